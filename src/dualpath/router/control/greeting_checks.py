"""Whether an engine that greets may join: it has to fit the cluster, and to make sense."""

import math
from collections.abc import Collection
from typing import TYPE_CHECKING

from dualpath.core.blocks import StoreNamespace
from dualpath.core.control import PROTOCOL_VERSION, Register
from dualpath.core.errors import EngineRefusedError
from dualpath.core.modes import Mode
from dualpath.core.rates import MAX_COMPUTED_WEIGHT
from dualpath.router.control.groups import check_rank
from dualpath.router.control.served_adapters import ServedAdapters
from dualpath.router.refusals import ControlRefusal

if TYPE_CHECKING:
    from dualpath.router.control.engine_state import EngineState


def check_greeting(
    hello: Register,
    namespace: StoreNamespace | None,
    mode: Mode | None,
    adapters: ServedAdapters,
    engines: "Collection[EngineState]",
) -> None:
    """Raise ``EngineRefusedError`` for an engine that may not join ``engines``.

    ``namespace`` and ``mode`` are those of the cluster, None while nobody has fixed them.
    """
    name = f"engine {hello.address.engine_id!r}"
    _check_settings(name, hello)
    _check_place(name, hello, engines)
    if hello.version != PROTOCOL_VERSION:
        raise EngineRefusedError(
            ControlRefusal.VERSION,
            f"{name} speaks control protocol {hello.version}, this router "
            f"{PROTOCOL_VERSION}; run the same dualpath version on router and engines",
        )
    modes = [known.value for known in Mode]
    if hello.mode not in modes:
        raise EngineRefusedError(
            ControlRefusal.MODE,
            f"{name} runs in mode {hello.mode!r}, known are {', '.join(modes)}; choose one",
        )
    if mode is not None and hello.mode != mode:
        raise EngineRefusedError(
            ControlRefusal.MODE,
            f"{name} runs in mode {hello.mode!r}, this router in {mode.value!r}; "
            "start the engine in the router's mode, or another router",
        )
    if namespace is not None and hello.namespace != namespace:
        raise EngineRefusedError(
            ControlRefusal.NAMESPACE,
            f"{name} differs in {_differences(hello.namespace, namespace)}; start it with "
            "the model, dtype, layout, block size and --speculative-config of the others, or "
            "use another router",
        )
    if lacking := adapters.differences(hello.adapters):
        raise EngineRefusedError(ControlRefusal.ADAPTERS, f"{name} {'; it '.join(lacking)}")


def _check_settings(name: str, hello: Register) -> None:
    if hello.hbm_tokens < 1 or hello.buffer_tokens < 0 or (hello.snic_bytes_per_s or 1) <= 0:
        raise EngineRefusedError(
            ControlRefusal.SETTINGS,
            f"{name} has hbm_tokens {hello.hbm_tokens} (at least 1), buffer_tokens "
            f"{hello.buffer_tokens} (at least 0), snic_bytes_per_s {hello.snic_bytes_per_s} "
            "(above 0); correct its settings",
        )
    for rate in (hello.rates.read_bytes, hello.rates.prefill_tokens):
        if rate is not None and not 0 < rate.per_s < math.inf:
            raise EngineRefusedError(
                ControlRefusal.SETTINGS,
                f"{name} has a {rate.origin} rate of {rate.per_s} per s; it must be above 0 "
                "and finite; start it with another {profile}",
            )
    weight = hello.rates.computed_weight
    if weight is not None and not 1 <= weight <= MAX_COMPUTED_WEIGHT:
        raise EngineRefusedError(
            ControlRefusal.SETTINGS,
            f"{name} has a computed_weight of {weight}; it must be between 1 and "
            f"{MAX_COMPUTED_WEIGHT:g}; start it with another {{profile}}",
        )
    for limit, value in hello.limits.items():
        if isinstance(value, int) and value < 1:
            raise EngineRefusedError(
                ControlRefusal.SETTINGS,
                f"{name} has the limit {limit} {value}; it must be at least 1; correct its "
                "settings",
            )


def _check_place(name: str, hello: Register, engines: "Collection[EngineState]") -> None:
    check_rank(name, hello, engines)
    for other in (engine.info for engine in engines if engine.alive):
        engine_id, role = other.engine_id, other.role
        if engine_id == hello.address.engine_id:
            continue
        if other.group == hello.group and role is not hello.address.role:
            raise EngineRefusedError(
                ControlRefusal.SETTINGS,
                f"{name} is a {hello.address.role.value} engine, group {hello.group!r} holds "
                f"the {role.value} engine {engine_id!r}; put it into a group of its own role",
            )


def _differences(theirs: StoreNamespace, ours: StoreNamespace) -> str:
    return ", ".join(
        f"{field} = {getattr(theirs, field)!r} where this router has {getattr(ours, field)!r}"
        for field in StoreNamespace.__struct_fields__
        if getattr(theirs, field) != getattr(ours, field)
    )
