"""How the compiled core is compiled: numba, the shared rules, and the cache on disk.

*Rules.*  The live scheduler and both cores call the same functions on plain numbers and arrays
(``policy``, ``plan.counts``, ``sim.rules``).  Whichever a compiled function calls is compiled as it
stands; for Python it stays as it is.

*No reference counting.*  ``lean`` and ``inlined`` switch numba's reference counting off, which
would count a state of two dozen arrays up and down at every call, atomically, at twenty times the
cost of the rest.  Such functions may take and slice arrays, but not create any; those that do are
``compiled`` and should take few of them.  Divisions are numpy's: division by zero is not checked.
``hold`` and ``prefetch`` are the only code here that relies on internals of numba.

*Cache.*  numba caches a function by its file's time stamp and line number, and does not look at the
functions that it calls.  So ``cached`` names the function by a digest of all functions and
constants that are compiled into it, and sets its file to the package's ``__init__.py``, which does
not change.  The digest is of syntax trees, without comments, docstrings and positions.
"""

import ast
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar, cast

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.imputils import lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import intrinsic, models, register_jitable, register_model
from numpy.typing import NDArray

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Value = TypeVar("Value")

_LEAN: dict[str, Any] = {"_nrt": False, "error_model": "numpy"}


def compiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile a function with reference counting, also when a lean function calls it."""
    return _compiled(function, _nrt=True)


def lean(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile a function that creates no arrays."""
    return _compiled(function, **_LEAN)


def inlined(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile a function that creates no arrays into each of its callers, without a call."""
    return _compiled(function, forceinline=True, **_LEAN)


def cached(function: Callable[Parameters, Result]) -> Any:  # noqa: ANN401  # numba's types are untyped
    """Compile a function that creates no arrays, once for all processes that share a cache."""
    package = sys.modules[__package__]
    python = cast(FunctionType, function)
    code = python.__code__.replace(co_filename=str(package.__file__), co_firstlineno=1)
    named = FunctionType(code, python.__globals__, f"{python.__name__}_{digest(function)}")
    named.__module__, named.__qualname__ = python.__module__, named.__name__
    try:
        return _compiled(named, cache=True, **_LEAN)
    except RuntimeError:
        # No directory can be written to: every process compiles for itself.
        return _compiled(named, **_LEAN)


def _compiled(
    function: Callable[Parameters, Result],
    **options: Any,  # noqa: ANN401
) -> Callable[Parameters, Result]:
    for called in _called(cast(FunctionType, function)):
        if called not in _REGISTERED:
            _REGISTERED.add(called)
            register_jitable(called)
    dispatcher: Callable[Parameters, Result] = numba.njit(**options)(function)
    return dispatcher


# ---------------------------------------------------------------- what is compiled

_REGISTERED: set[FunctionType] = set()


def digest(function: Callable[..., Any]) -> str:
    """Return a digest of all that is compiled into a function; texts for readers do not count."""
    compiled_functions = _called(cast(FunctionType, function), through_compiled=True)
    sources: dict[str, dict[str, str]] = {}
    parts = [ast.dump(_without_texts(inspect.getsource(sys.modules[__name__])))]
    for part in (cast(FunctionType, function), *compiled_functions):
        if part.__module__ not in sources:
            sources[part.__module__] = _definitions(sys.modules[part.__module__])
        parts.append(sources[part.__module__][part.__code__.co_name])
        parts += [f"{name} = {text}" for name, value in _used(part) if (text := _constant(value))]
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()[:16]


def _called(function: FunctionType, *, through_compiled: bool = False) -> list[FunctionType]:
    """Return the functions of this project that a function calls, directly or not.

    Only ``through_compiled`` are those in it that have been compiled for themselves.
    """
    found: dict[FunctionType, None] = {}
    left = [function]
    while left:
        for _, value in _used(left.pop()):
            called = getattr(value, "py_func", value) if through_compiled else value
            if (
                isinstance(called, FunctionType)
                and called.__module__.startswith("dualpath")
                and called is not function
                and called not in found
            ):
                found[called] = None
                left.append(called)
    return list(found)


def _used(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the globals that a function names, and those of modules that it names."""
    names = _names(function.__code__)
    for name in sorted(names):
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType):
            attributes = vars(value)
            yield from ((n, attributes[n]) for n in sorted(names) if n in attributes)
        elif value is not None:
            yield name, value


def _names(code: CodeType) -> set[str]:
    nested = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*nested)


def _constant(value: object) -> str:
    """Describe a number or a named tuple's class, which code is compiled for; else nothing."""
    if isinstance(value, type) and hasattr(value, "_fields"):
        fields = (f"{n}: {_constant(a) or a!r}" for n, a in value.__annotations__.items())
        return f"{value.__name__}({', '.join(fields)})"
    return repr(value) if isinstance(value, (int, float, tuple)) else ""


def _definitions(module: ModuleType) -> dict[str, str]:
    tree = _without_texts(inspect.getsource(module))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return {function.name: ast.dump(function) for function in functions}


def _without_texts(source: str) -> ast.Module:
    """Return a source's syntax tree without docstrings; comments are in none."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
            node.body = [
                statement
                for statement in node.body
                if not (
                    isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
                )
            ]
    return tree


# ---------------------------------------------------------------- numba's internals


class _Held(types.Type):
    """A pointer to a named tuple in memory; its attributes are read when they are used."""

    def __init__(self, value: Any) -> None:  # noqa: ANN401  # numba's types are untyped
        self.value = value
        super().__init__(name=f"Held({value.instance_class.__name__})")

    @property
    def key(self) -> Any:  # noqa: ANN401
        return self.value


@register_model(_Held)
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
