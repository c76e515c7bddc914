"""`dualpath serve`: router, prefill and decode engines on this machine, or on a Ray cluster."""

import argparse
import importlib.util
import os
from typing import TYPE_CHECKING

from dualpath.cli.output import print_progress
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
from dualpath.cli.signals import sigterm_as_interrupt, watch_until_stopped
from dualpath.core.errors import ConfigError
from dualpath.core.extras import not_installed, require_packages
from dualpath.core.settings import Given, Origin
from dualpath.launch.settings import LocalClusterSettings

if TYPE_CHECKING:
    from dualpath.launch.executor import Unit
    from dualpath.router.settings import RouterSettings
    from dualpath.vllm.front_end_settings import FrontEndSettings

PARTS = (Part(CLUSTER, positional=("model",)),)

_EPILOG = """\
Router and engines can also be started separately, on machines that reach each other:
`dualpath router MODEL`, and vLLM servers with our --kv-transfer-config (`--dry-run` prints the
commands).
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath serve`."""
    parser = subparsers.add_parser(
        "serve",
        help="start router, prefill and decode engines, on this machine or on a Ray cluster",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands and exit")
    add_parts(parser, PARTS)


def layers(args: argparse.Namespace) -> Configuration:
    """Return the settings of flags, environment and file; raises ``ConfigError``."""
    origin = Origin.FLAG if args.config else Origin.DEFAULT
    file = Given(CLUSTER, "config_file", args.config or "", origin, "--config")
    return configuration(args, PARTS, [file])


def checked_layers(args: argparse.Namespace) -> Configuration:
    """Return ``layers`` after the checks of ``cluster_settings``."""
    cluster_settings(args)
    return layers(args)


def cluster_settings(args: argparse.Namespace) -> LocalClusterSettings:
    """Return the settings of the cluster; raises ``ConfigError``."""
    found = layers(args)
    settings = found.settings(CLUSTER, LocalClusterSettings)
    _refuse_overridden(found, settings)
    _router_settings(settings)
    return settings


def _router_settings(
    settings: LocalClusterSettings,
) -> "tuple[RouterSettings, FrontEndSettings]":
    """Read the router's settings as its own command will; raises ``ConfigError``."""
    from dualpath.cli import router
    from dualpath.launch.commands import router_command

    parser = argparse.ArgumentParser()
    router.add_parser(parser.add_subparsers())
    return router.settings_of(parser.parse_args(router_command(settings, settings.port, 0)))


def _refuse_overridden(found: Configuration, settings: LocalClusterSettings) -> None:
    """Raise ``ConfigError`` for settings that command lines of router or engines override."""
    from dualpath.launch.commands import engine_keys, router_keys

    taken = {ENGINE: engine_keys(settings), ROUTER: router_keys(settings)}
    for given in [g for section in (ENGINE, ROUTER, ENDPOINT) for g in found.elsewhere(section)]:
        if given.section == ENDPOINT or given.key in taken[given.section]:
            raise ConfigError(
                f"{given.place} has no effect: `dualpath serve` configures its router and engines "
                f"from [{CLUSTER}]; set it there"
            )


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C, or after SIGTERM until running requests have ended; returns 0.

    Processes that exit are restarted.
    Raises ``ConfigError`` or ``EngineLostError``; no process is left running then.
    """
    settings = cluster_settings(args)
    if args.dry_run:
        return _print_commands(settings)

    from dualpath.launch.start_checks import needed_packages

    require_packages(*needed_packages(settings))
    from dualpath.launch.local_cluster import LocalCluster

    with sigterm_as_interrupt():
        try:
            with LocalCluster(settings, _say) as cluster:
                if cluster.cluster_url != cluster.endpoint:
                    urls = ", ".join(cluster.cluster_urls)
                    _say(f"cluster at {urls} (/dashboard, status, roles)")
                _say(f"endpoint {cluster.endpoint}/v1 (Ctrl-C stops it)")
                watch_until_stopped(cluster, _say)
        except KeyboardInterrupt:
            _say("stopped")
    return 0


def _print_commands(settings: LocalClusterSettings) -> int:
    import itertools
    import shlex

    from dualpath.launch.commands import (
        ENGINE_ENTRY,
        DpRank,
        engine_command,
        engine_environment,
        router_command,
    )
    from dualpath.launch.devices import DevicePlan, has_cpu_build, usable_devices
    from dualpath.launch.executor import engine_units, router_units
    from dualpath.launch.ports import LOOPBACK
    from dualpath.launch.start_checks import check_start
    from dualpath.router.settings import UNIT_PORTS_APART

    check_start(settings)
    _report_missing_packages(settings)
    _check_vllm_args(settings)
    on_ray = settings.executor == "ray"
    plan = DevicePlan(settings, () if on_ray else usable_devices(settings.devices))
    on_cpus = has_cpu_build() if on_ray else plan.on_cpus
    # Works with every build; the `vllm` command does not work in the CPU build.
    module = ENGINE_ENTRY.partition(":")[0]
    control_port = 5700
    rpc_ports = itertools.count(29550)  # starting at vLLM's default, one for each group
    router, *_ = router_units(settings)
    _print_bundle(settings, router, on_cpus)
    print("dualpath " + shlex.join(router_command(settings, settings.port, control_port)))
    port = settings.port
    for unit in engine_units(settings):
        assert unit.role is not None
        _print_bundle(settings, unit, on_cpus)
        size, rpc_port = len(unit.processes), next(rpc_ports)
        for rank in range(size):
            port += 1
            dp = DpRank(rank, size, rpc_port) if size > 1 else None
            command = engine_command(
                *(settings, unit.role, unit.index, port),
                control_port + settings.unit(unit.index) * UNIT_PORTS_APART,
                host="NODE" if on_ray else LOOPBACK,
                router_host="ROUTER" if on_ray else LOOPBACK,
                dp=dp,
                on_cpus=on_cpus,
            )
            own = plan.environment(unit.role, unit.index, rank)
            own |= engine_environment(gpu_build=not on_cpus)
            environment = "".join(f"{name}={value} " for name, value in own.items())
            print(f"{environment}python -m {module} {shlex.join(command)}")
    return 0


def _report_missing_packages(settings: LocalClusterSettings) -> None:
    """Report what a start lacks here; the commands may be for other machines."""
    from dualpath.launch.start_checks import needed_packages

    try:
        require_packages(*needed_packages(settings))
    except ModuleNotFoundError as error:
        print_progress(f"a start on this machine needs {not_installed(error)}")


def _check_vllm_args(settings: LocalClusterSettings) -> None:
    """Let vLLM's parser read ``--vllm-args``, as the router does; raises ``ConfigError``.

    Engines get the same arguments.  vLLM is imported only if there are any, since that takes
    seconds.
    """
    if not settings.vllm_args or importlib.util.find_spec("vllm") is None:
        return
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout has the commands
    try:
        from dualpath.vllm.engine_config import parse_front_end_arguments

        parse_front_end_arguments(_router_settings(settings)[1])
    except ConfigError:
        raise
    except Exception as error:  # such as a build for GPUs on a machine without one
        print_progress(f"--vllm-args are not checked: vLLM cannot be used here ({error})")


def _print_bundle(settings: LocalClusterSettings, unit: "Unit", on_cpus: bool) -> None:
    from dualpath.launch.ray_executor import bundle, format_resources

    if settings.executor == "ray":
        resources = bundle(unit, settings.ray_cpus, with_devices=not on_cpus)
        print(f"# {unit.name}: a bundle of {format_resources(resources)}")


def _say(text: str) -> None:
    print(f"dualpath: {text}", flush=True)
