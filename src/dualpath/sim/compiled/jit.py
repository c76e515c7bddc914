"""How functions of the compiled core are compiled: numba with its types left to the type checker.

``lean`` and ``inlined`` switch numba's reference counting off.  A state of a dozen arrays would be
counted up and down at every call, atomically, at twenty times the cost of the rest; and a call
without inlining still copies seven words per array.  Such functions may take and slice arrays, but
not make any; those that do are ``compiled`` and should take few of them.

Nothing is cached on disk here: numba does not notice that a function called from another file has
changed.
"""

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, cast

import numba
from numba.core import cgutils, types
from numba.extending import intrinsic

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Value = TypeVar("Value")


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


class Held(Generic[Value]):
    """A value on a compiled caller's stack, handed down as one word."""


@intrinsic
def _hold(_typing: Any, value: Any) -> Any:  # noqa: ANN401  # numba's interface is untyped
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        data = context.data_model_manager[value].as_data(builder, arguments[0])
        return cgutils.alloca_once_value(builder, data)

    return types.CPointer(value)(value), generate


@intrinsic
def _held(_typing: Any, pointer: Any) -> Any:  # noqa: ANN401  # numba's interface is untyped
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        data = builder.load(arguments[0])
        return context.data_model_manager[pointer.dtype].from_data(builder, data)

    return pointer.dtype(pointer), generate


hold = cast(Callable[[Value], Held[Value]], _hold)
"""Put a value on the stack of a compiled function, where it lives until that function returns.

A tuple of many arrays costs every call hundreds of words to copy; a pointer costs one, and what a
callee does not look at is never loaded.
"""

held = cast(Callable[[Held[Value]], Value], _held)
"""Return the value that a caller holds."""
