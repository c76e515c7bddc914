"""Commands that start emulated engines and their router, for the same launcher as vLLM clusters."""

from typing import Any

import msgspec

from dualpath.core.addresses import HostPort, http_url, tcp_endpoint
from dualpath.core.cluster import Role
from dualpath.core.settings import arguments
from dualpath.engine.settings import EngineSettings
from dualpath.launch.commands import ROUTER_ENTRY, Commands, DpRank, rank_id
from dualpath.launch.settings import LocalClusterSettings
from dualpath.router.settings import RouterSettings
from dualpath_lab.emulated.settings import EmulatedOptions


def emulated_commands(
    options: EmulatedOptions,
    router: RouterSettings | None = None,
    engine: EngineSettings | None = None,
    *,
    touch_memory: bool = False,
) -> Commands:
    """Return the commands that start engines with these options and a router with these settings.

    Addresses, mode, storage, buffers and transport are those of the cluster, and so is the model if
    the options name none.  Other settings of an engine are those of ``engine``.
    """
    router_settings = router or RouterSettings()

    def router_command(
        settings: LocalClusterSettings,
        port: int,
        control_port: int,
        standby_lock: str = "",
        cluster_port: int = 0,
    ) -> list[str]:
        own = msgspec.structs.replace(
            router_settings,
            control_host=settings.control_host,
            control_port=control_port,
            mode=settings.mode,
        )
        if settings.front_ends:
            own = msgspec.structs.replace(
                own,
                front_ends=settings.front_ends,
                units=settings.units,
                cluster_port=cluster_port,
            )
        return ["emulate", "router", "--port", str(port), *arguments(own)]

    def engine_command(
        settings: LocalClusterSettings,
        role: Role,
        index: int,
        port: int,
        control_port: int,
        *,
        host: str,
        router_host: str,
        named_as: Role | None,
        dp: DpRank | None = None,
        **more: object,
    ) -> list[str]:
        rank = dp or DpRank(0, 1, 0)
        name = rank_id(named_as or role, index, rank.rank, rank.size)
        named: dict[str, Any] = {
            "role": role,
            "engine_id": name,
            "router": tcp_endpoint(router_host, control_port),
            "api_url": http_url(host, port),
            "storage": settings.storage,
            "mode": settings.mode,
            "buffer_bytes": settings.buffer_bytes,
            "layer_buffers": settings.layer_buffers,
            "compute_quota_s": settings.compute_quota_s,
            "transport": settings.transport,
        }
        if settings.trace_dir:
            named["trace_out"] = f"{settings.trace_dir}/{name}.json"
        if engine is None:
            one = EngineSettings(**named, touch_memory=touch_memory)
        else:
            one = msgspec.structs.replace(engine, **named)
        own = msgspec.structs.replace(
            options,
            host=host,
            port=port,
            model=options.model or settings.model,
            dp_rank=rank.rank,
            dp_size=rank.size,
            dp_address=str(HostPort(rank.address, rank.rpc_port)) if dp else "",
        )
        of_role, *flags = arguments(one, positional=("role",))
        return ["emulate", of_role, *flags, *arguments(own)]

    return Commands(ROUTER_ENTRY, router_command, ROUTER_ENTRY, engine_command)
