"""How functions of the compiled core are compiled: numba with its types left to the type checker.

``lean`` and ``inlined`` switch numba's reference counting off.  A state of a dozen arrays would be
counted up and down at every call, atomically, at twenty times the cost of the rest.  Such functions
may take and slice arrays, but not make any; those that do are ``compiled`` and should take few of
them.  Divisions are numpy's: a division by zero is not looked for.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models, register_default
from numba.core.imputils import lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import intrinsic
from numpy.typing import NDArray

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Value = TypeVar("Value")


def compiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile a function as numba does by default, also when a lean function calls it."""
    dispatcher: Callable[Parameters, Result] = numba.njit(_nrt=True)(function)
    return dispatcher


def lean(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile a function that makes no arrays."""
    return _once(numba.njit(_nrt=False, error_model="numpy")(function))


def inlined(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile a function that makes no arrays into each of its callers, without a call."""
    return _once(numba.njit(_nrt=False, error_model="numpy", forceinline=True)(function))


def _once(dispatcher: Any) -> Any:  # noqa: ANN401  # numba's types are untyped
    """Compile no more than compiled callers need, which is most of the compiler's time.

    They hand over all integers as 64 bits, so that there are no versions for other widths; and what
    takes a held tuple needs no way in from Python.
    """
    template = dispatcher.get_call_template

    def get_call_template(arguments: Any, keywords: Any) -> Any:  # noqa: ANN401
        options, before = dispatcher.targetoptions, dict(dispatcher.targetoptions)
        if any(isinstance(argument, _Held) for argument in arguments):
            options.update(no_cpython_wrapper=True, no_cfunc_wrapper=True)
        try:
            return template(
                tuple(_wide(argument) for argument in arguments),
                {name: _wide(argument) for name, argument in keywords.items()},
            )
        finally:
            options.clear()
            options.update(before)

    dispatcher.get_call_template = get_call_template
    return dispatcher


def _wide(argument: Any) -> Any:  # noqa: ANN401
    return types.int64 if isinstance(argument, types.Integer) else argument


class _Held(types.Type):
    """A named tuple in memory; its attributes are read when they are used."""

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

A tuple of many arrays costs every call hundreds of words to copy, and the compiler minutes; what is
held is one pointer, has the same attributes, and what a callee does not look at is never loaded.
A named tuple inside is held as well.
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
"""Let the cache line of ``array[row, column]`` (``array[row]`` of a vector) come from memory."""
