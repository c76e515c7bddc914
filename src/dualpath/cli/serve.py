"""`dualpath serve`: router, prefill and decode engines on this machine."""

import argparse

from dualpath.cli.packages import require_packages
from dualpath.cli.settings import (
    CLUSTER,
    ENDPOINT,
    ENGINE,
    ROUTER,
    Configuration,
    Part,
    add_parts,
    configuration,
)
from dualpath.cli.termination import ended_by_sigterm, watch_until_ended
from dualpath.core.configuration import Given, Origin
from dualpath.core.errors import ConfigError
from dualpath.ops.launch.settings import LocalClusterSettings

PARTS = (Part(CLUSTER, positional=("model",)),)

_EPILOG = """\
The parts also start one by one, on any machine that reaches the others: `dualpath router MODEL`,
and plain vLLM servers with our --kv-transfer-config (`--dry-run` prints the commands).
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath serve`."""
    parser = subparsers.add_parser(
        "serve",
        help="start router, prefill and decode engines on this machine",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands and exit")
    add_parts(parser, PARTS)


def layers(args: argparse.Namespace) -> Configuration:
    """Return what flags, environment and file say; raises ``ConfigError``."""
    origin = Origin.FLAG if args.config else Origin.DEFAULT
    file = Given(CLUSTER, "config_file", args.config or "", origin, "--config")
    return configuration(args, PARTS, [file])


def checked_layers(args: argparse.Namespace) -> Configuration:
    """Return the same after the checks of ``cluster_settings``."""
    cluster_settings(args)
    return layers(args)


def cluster_settings(args: argparse.Namespace) -> LocalClusterSettings:
    """Return the settings of the cluster; raises ``ConfigError``."""
    found = layers(args)
    settings = found.settings(CLUSTER, LocalClusterSettings)
    _refuse_overridden(found, settings)
    return settings


def _refuse_overridden(found: Configuration, settings: LocalClusterSettings) -> None:
    """Raise ``ConfigError`` for what router or engines get otherwise, by their command line."""
    from dualpath.ops.launch.commands import engine_keys, router_keys

    taken = {ENGINE: engine_keys(settings), ROUTER: router_keys(settings)}
    for given in [g for section in (ENGINE, ROUTER, ENDPOINT) for g in found.elsewhere(section)]:
        if given.section == ENDPOINT or given.key in taken[given.section]:
            raise ConfigError(
                f"{given.place} does not count here: `dualpath serve` gives its router and "
                f"engines what stands in [{CLUSTER}]; set it there"
            )


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C, or after SIGTERM until requests under way have ended; returns 0.

    A process that ends is started again.
    Raises ``ConfigError`` or ``EngineLostError``; nothing is left running then.
    """
    settings = cluster_settings(args)
    if args.dry_run:
        return _print_commands(settings)

    require_packages("vllm", *(["nixl_cu12"] if settings.mode.moves_bytes else []))
    from dualpath.ops.launch.local_cluster import LocalCluster

    with ended_by_sigterm():
        try:
            with LocalCluster(settings, _say) as cluster:
                _say(f"endpoint {cluster.endpoint}/v1 (Ctrl-C ends it)")
                watch_until_ended(cluster, _say)
        except KeyboardInterrupt:
            _say("stopped")
    return 0


def _print_commands(settings: LocalClusterSettings) -> int:
    import itertools
    import shlex

    from dualpath.core.cluster import Role
    from dualpath.ops.launch.commands import (
        ENGINE_ENTRY,
        ENGINE_ENVIRONMENT,
        DpRank,
        engine_command,
        router_command,
    )
    from dualpath.ops.launch.devices import DevicePlan, usable_devices
    from dualpath.ops.launch.start_checks import check_settings

    check_settings(settings)
    plan = DevicePlan(settings, usable_devices(settings.devices))
    # Works with every build; the `vllm` command does not find itself in the CPU build.
    module = ENGINE_ENTRY.partition(":")[0]
    control_port = 5700
    rpc_ports = itertools.count(29550)  # from vLLM's default on, one for each group
    print("dualpath " + shlex.join(router_command(settings, settings.port, control_port)))
    port = settings.port
    for role, count in ((Role.PREFILL, settings.prefill), (Role.DECODE, settings.decode)):
        size = settings.ranks(role)
        for index in range(count):
            rpc_port = next(rpc_ports)
            for rank in range(size):
                port += 1
                dp = DpRank(rank, size, rpc_port) if size > 1 else None
                command = engine_command(
                    settings, role, index, port, control_port, dp=dp, on_cpus=plan.on_cpus
                )
                own = ENGINE_ENVIRONMENT if plan.on_cpus else plan.environment(role, index, rank)
                environment = " ".join(f"{name}={value}" for name, value in own.items())
                print(f"{environment} python -m {module} {shlex.join(command)}")
    return 0


def _say(text: str) -> None:
    print(f"dualpath: {text}", flush=True)
