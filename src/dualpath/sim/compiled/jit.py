"""How functions of the compiled core are compiled: numba with its types left to the type checker.

``lean`` and ``inlined`` switch numba's reference counting off.  A state of a dozen arrays would be
counted up and down at every call, atomically, at twenty times the cost of the rest; and a call
without inlining still copies seven words per array.  Such functions may take and slice arrays, but
not make any; those that do are ``compiled`` and should take few of them.

Nothing is cached on disk here: numba does not notice that a function called from another file has
changed.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numba

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def compiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile a function as numba does by default, also when a lean function calls it."""
    dispatcher: Callable[Parameters, Result] = numba.njit(_nrt=True)(function)
    return dispatcher


def lean(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile a function that makes no arrays."""
    dispatcher: Callable[Parameters, Result] = numba.njit(_nrt=False)(function)
    return dispatcher


def inlined(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile a function that makes no arrays into each of its callers, without a call."""
    dispatcher: Callable[Parameters, Result] = numba.njit(_nrt=False, forceinline=True)(function)
    return dispatcher
