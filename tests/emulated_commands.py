"""Commands of emulated engines and their router, for clusters that are launched as vLLM's are."""

from typing import Any

from dualpath.core.cluster import Role
from dualpath.core.settings import arguments
from dualpath.engine.settings import EngineSettings
from dualpath.laboratory.emulated.settings import EmulatedOptions
from dualpath.ops.launch.commands import ROUTER_ENTRY, Commands, engine_id
from dualpath.ops.launch.settings import LocalClusterSettings
from dualpath.router.settings import RouterSettings


def _router(
    settings: LocalClusterSettings, port: int, control_port: int, *more: object
) -> list[str]:
    router = RouterSettings(
        control_host=settings.control_host,
        control_port=control_port,
        mode=settings.mode,
    )
    return ["emulate", "router", "--port", str(port), *arguments(router)]


def _engine(
    settings: LocalClusterSettings,
    role: Role,
    index: int,
    port: int,
    control_port: int,
    *,
    host: str,
    router_host: str,
    named_as: Role | None,
    **more: Any,
) -> list[str]:
    engine = EngineSettings(
        role=role,
        engine_id=engine_id(named_as or role, index),
        router=f"tcp://{router_host}:{control_port}",
        api_url=f"http://{host}:{port}",
        storage=settings.storage,
        mode=settings.mode,
        buffer_bytes=settings.buffer_bytes,
    )
    options = EmulatedOptions(
        host=host,
        port=port,
        model=settings.model,
        layers=4,
        kv_bytes_per_token=4096,
        block_tokens=16,
        hbm_bytes=16 << 20,
        transport="memory",
    )
    of_role, *flags = arguments(engine, positional=("role",))
    return ["emulate", of_role, *flags, *arguments(options)]


EMULATED = Commands(ROUTER_ENTRY, _router, ROUTER_ENTRY, _engine)
