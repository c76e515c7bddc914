"""How the compiled core is compiled: numba, the shared rules, and the cache on disk.

*Rules.*  The functions on plain numbers and arrays in ``KERNEL_MODULES`` are called by the live
scheduler and by both cores.  ``register_jitable`` lets compiled code call them and leaves them as
they are for Python.

*No reference counting.*  ``lean`` and ``inlined`` switch numba's reference counting off, which
would count a state of two dozen arrays up and down at every call, atomically, at twenty times the
cost of the rest.  Such functions may take and slice arrays, but not create any; those that do are
``compiled`` and should take few of them.  Divisions are numpy's: division by zero is not checked.

*Cache.*  numba caches a function by its file's time stamp and line number, and does not look at the
files of the functions that it calls.  So ``cached`` names the function by a digest of everything
compiled into it, and its file is the package's ``__init__.py``, which does not change.  The digest
is of the syntax trees, without comments, docstrings and positions.
"""

import ast
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar, cast

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models, register_default
from numba.core.imputils import lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import intrinsic, register_jitable
from numpy.typing import NDArray

from dualpath.core import blocks
from dualpath.model.sim import derived, result, rules
from dualpath.plan import counts
from dualpath.policy import (
    accounts,
    baselines,
    batching,
    decode,
    events,
    kept,
    prefill,
    read_side,
)

#: Modules of functions on plain numbers that compiled code calls.
KERNEL_MODULES = (
    *(blocks, counts, rules),
    *(accounts, baselines, batching, decode, kept, prefill, read_side),
)
#: Modules whose constants compiled code uses.
CONSTANT_MODULES = (derived, events, result)

for _module in KERNEL_MODULES:
    for _, _function in inspect.getmembers(_module, inspect.isfunction):
        if _function.__module__ == _module.__name__:
            register_jitable(_function)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Value = TypeVar("Value")

_LEAN: dict[str, Any] = {"_nrt": False, "error_model": "numpy"}


def compiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile a function with reference counting, also when a lean function calls it."""
    dispatcher: Callable[Parameters, Result] = numba.njit(_nrt=True)(function)
    return dispatcher


def lean(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile a function that creates no arrays."""
    dispatcher: Callable[Parameters, Result] = numba.njit(**_LEAN)(function)
    return dispatcher


def inlined(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile a function that creates no arrays into each of its callers, without a call."""
    dispatcher: Callable[Parameters, Result] = numba.njit(forceinline=True, **_LEAN)(function)
    return dispatcher


class _Held(types.Type):
    """A pointer to a named tuple in memory; its attributes are read when they are used."""

    def __init__(self, value: Any) -> None:  # noqa: ANN401  # numba's types are untyped
        self.value = value
        super().__init__(name=f"Held({value.instance_class.__name__})")

    @property
    def key(self) -> Any:  # noqa: ANN401
        return self.value


@register_default(_Held)
class _HeldModel(models.PrimitiveModel):
    def __init__(self, manager: Any, held: Any) -> None:  # noqa: ANN401
        data = manager[held.value].get_data_type()
        super().__init__(manager, held, data.as_pointer())


@infer_getattr
class _HeldAttributes(AttributeTemplate):
    key = _Held

    def generic_resolve(self, held: Any, attribute: str) -> Any:  # noqa: ANN401
        return _field(held, attribute)[1]


@lower_getattr_generic(_Held)
def _read_field(context: Any, builder: Any, held: Any, pointer: Any, attribute: str) -> Any:  # noqa: ANN401
    position, field = _field(held, attribute)
    place = cgutils.gep_inbounds(builder, pointer, 0, position)
    if isinstance(field, _Held):
        return place
    return context.data_model_manager[field].from_data(builder, builder.load(place))


def _field(held: Any, attribute: str) -> tuple[int, Any]:  # noqa: ANN401
    position = held.value.fields.index(attribute)
    field = held.value.types[position]
    if isinstance(field, types.BaseNamedTuple):
        field = _Held(field)
    return position, field


@intrinsic
def _hold(_typing: Any, value: Any) -> Any:  # noqa: ANN401
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        data = context.data_model_manager[value].as_data(builder, arguments[0])
        return cgutils.alloca_once_value(builder, data)

    return _Held(value)(value), generate


hold = cast(Callable[[Value], Value], _hold)
"""Put a named tuple on a compiled function's stack, where it lives until that function returns.

A tuple of many arrays costs every call hundreds of words to copy, and the compiler minutes.  A held
tuple is one pointer with the same attributes, which are loaded when they are used.  A named tuple
inside it is held as well.
"""


@intrinsic
def _prefetch(_typing: Any, array: Any, row: Any, column: Any) -> Any:  # noqa: ANN401
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        kind = signature.args[0]
        values = context.make_array(kind)(context, builder, arguments[0])
        place = cgutils.get_item_pointer(
            context, builder, kind, values, arguments[1 : 1 + kind.ndim], wraparound=False
        )
        word = ir.IntType(32)
        pointer = builder.bitcast(place, cgutils.voidptr_t)
        function = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, word, word, word])
        prefetch = builder.module.declare_intrinsic(
            "llvm.prefetch", [cgutils.voidptr_t], fnty=function
        )
        builder.call(prefetch, [pointer, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.none(array, types.intp, types.intp), generate


prefetch = cast(Callable[[NDArray[Any], int, int], None], _prefetch)
"""Load the cache line of ``array[row, column]`` (``array[row]`` of a vector) from memory."""


def cached(function: Callable[..., int]) -> Any:  # noqa: ANN401  # numba's types are untyped
    """Compile a function that creates no arrays, once for all processes that share a cache."""
    package = sys.modules[__package__]
    code = function.__code__.replace(co_filename=str(package.__file__), co_firstlineno=1)
    named = FunctionType(code, function.__globals__, f"{function.__name__}_{source_digest()}")
    named.__module__, named.__qualname__ = function.__module__, named.__name__
    try:
        return numba.njit(cache=True, **_LEAN)(named)
    except RuntimeError:
        # No directory can be written to: every process compiles for itself.
        return numba.njit(**_LEAN)(named)


def source_digest() -> str:
    """Return a digest of all that is compiled: equal for sources that differ in texts alone."""
    digest = hashlib.sha256()
    for module in (*KERNEL_MODULES, *CONSTANT_MODULES, *_own_modules()):
        digest.update(module.__name__.encode())
        # The classes of the policy are not compiled.
        skipped = () if module.__package__ == __package__ else (ast.ClassDef,)
        digest.update(_meaning(inspect.getsource(module), skipped).encode())
    return digest.hexdigest()[:16]


def _own_modules() -> Iterator[ModuleType]:
    names = ("jit", "tables", "scheduler", "machine", "rounds", "core")
    return (sys.modules[f"{__package__}.{name}"] for name in names)


def _meaning(source: str, skipped: tuple[type[ast.stmt], ...]) -> str:
    """Return a source's syntax tree without docstrings, comments and positions."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
            node.body = [
                statement
                for statement in node.body
                if not isinstance(statement, skipped)
                and not (
                    isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
                )
            ]
    return ast.dump(tree)
