"""``dualpath emulate``: a process of a cluster whose engines take time but compute nothing."""

import argparse

from dualpath.cli.configuration import ROUTER, make_configurable
from dualpath.cli.emulate_settings import (
    checked_layers,
    emulated_settings,
    http_address,
    router_settings,
)
from dualpath.cli.nixl_arguments import add_nixl_arguments
from dualpath.cli.security_arguments import add_client_arguments, add_secret_argument
from dualpath.core.cluster import Role
from dualpath.core.modes import Mode

__all__ = ["add_parser", "checked_layers", "emulated_settings", "router_settings", "run"]

#: Of NIXL's progress thread: it wakes on events too, and a hundred engines may share a machine.
PROGRESS_DELAY_US = 5000

_DESCRIPTION = """Start one emulated engine, or a router for such engines. Everything is real but
the kernels: scheduler, storage, buffers, transfers and checksums are those of a vLLM engine; a
forward pass takes the time that the simulator's cost model says, and KV bytes are a function of
token prefix and layer, compared wherever they arrive. Neither vLLM nor a model is needed."""
_EPILOG = """\
dualpath emulate router  --port 8000 --control tcp://127.0.0.1:5700
dualpath emulate prefill --model qwen2.5-32b --storage kv --control tcp://127.0.0.1:5700
dualpath emulate decode  --model qwen2.5-32b --storage kv --control tcp://127.0.0.1:5700
dualpath replay trace.jsonl --endpoint http://127.0.0.1:8000
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath emulate`."""
    parser = subparsers.add_parser(
        "emulate",
        help="start an emulated engine, or a light router for such engines",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    make_configurable(parser)
    parser.add_argument("role", choices=[*(role.value for role in Role), ROUTER])
    parser.add_argument("--host", default="127.0.0.1", help="of the HTTP server")
    parser.add_argument("--port", type=int, default=0, help="of the HTTP server, 0: any free one")
    parser.add_argument(
        "--control",
        default="tcp://127.0.0.1:5700",
        metavar="TCP-ADDRESS",
        help="where engines register: a router listens there, an engine connects",
    )
    parser.add_argument(
        "--mode", choices=[mode.value for mode in Mode], default=Mode.DUALPATH.value
    )
    add_secret_argument(parser)
    _add_engine_arguments(parser)
    _add_model_arguments(parser)
    _add_router_arguments(parser)
    add_client_arguments(parser)


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engine")
    engine.add_argument("--engine-id", default="", help="default: role and process id")
    engine.add_argument("--node", default="", help="engines of a node share its SNIC")
    engine.add_argument("--group", default="", help="scheduling group; default: the role")
    engine.add_argument(
        "--api-url", default="", metavar="URL", help="as the router reaches it; default: host, port"
    )
    engine.add_argument(
        "--storage", metavar="PATH", help="directory of the external KV storage; required"
    )
    engine.add_argument("--buffer-mib", type=int, default=1024, help="PE or DE buffer")
    engine.add_argument("--hbm-mib", type=int, default=1024, help="emulated HBM for KV")
    engine.add_argument(
        "--layer-buffers", type=int, default=2, help="layers of KV in a PE's HBM, 0: all"
    )
    engine.add_argument(
        "--snic-mb-per-s", type=float, default=0.0, help="throttle storage reads; 0: not at all"
    )
    engine.add_argument(
        "--compute-quota-s", type=float, default=0.3, help="in the model's time; 0: no quota"
    )
    engine.add_argument(
        "--batch-cap-tokens", type=int, default=1024, help="per pass in modes without quota"
    )
    engine.add_argument("--ucx-tls", default="", help="UCX transports, such as tcp")
    engine.add_argument(
        "--progress-delay-us", type=int, default=PROGRESS_DELAY_US, help="of NIXL; 0 with RDMA"
    )
    add_nixl_arguments(engine)
    engine.add_argument("--trace-out", default="", metavar="FILE", help="write a Chrome trace")


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        metavar="NAME|COSTS.toml",
        help="catalog model, or measured costs of `dualpath profile`; required for engines",
    )
    model.add_argument("--gpu", default="hopper", metavar="NAME", help="rates for a catalog model")
    model.add_argument("--speedup", type=float, default=1.0, help="compute that much faster")
    model.add_argument("--layers", type=int, help="default: the model's")
    model.add_argument(
        "--kv-bytes-per-token",
        type=float,
        metavar="BYTES",
        help="over all layers, rounded to whole words per layer; default: the model's",
    )
    model.add_argument("--block-size", type=int, default=64, help="tokens per Full Block")
    model.add_argument("--vocab-size", type=int, default=32000)
    model.add_argument(
        "--max-model-len", type=int, metavar="TOKENS", help="default: the model's context"
    )
    model.add_argument(
        "--verify",
        choices=("auto", "full", "sampled", "checksum"),
        default="auto",
        help="compare every byte of arriving KV, a word of every token and layer, or only storage "
        "checksums; auto: every byte of blocks up to 1 MiB",
    )


def _add_router_arguments(parser: argparse.ArgumentParser) -> None:
    router = parser.add_argument_group("router")
    router.add_argument("--alpha-tokens", type=int, help="alpha of Algorithm 1; default: derived")
    router.add_argument("--beta-tokens", type=int, help="beta of Algorithm 1; default: derived")
    router.add_argument(
        "--event-log", default="", metavar="FILE", help="record the scheduler's decisions"
    )
    router.add_argument(
        "--otlp-traces-endpoint",
        default="",
        metavar="URL",
        help="OpenTelemetry collector that gets a trace of every request",
    )


def run(args: argparse.Namespace) -> int:
    """Run the process until a signal ends it; returns 0.

    Raises:
        ConfigError: a setting is wrong or an address taken; nothing is left running.
    """
    import asyncio
    import logging

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if args.role == ROUTER:
        settings = router_settings(args)

        from dualpath.laboratory.emulated.front_door import run_front_door

        asyncio.run(run_front_door(settings, *http_address(args)))
    else:
        engine_settings = emulated_settings(args)

        from dualpath.laboratory.emulated.process import run_engine

        asyncio.run(run_engine(engine_settings))
    return 0
