"""Arguments that carry the traffic class of KV to NIXL."""

import argparse

_PORTS_KEY = "TCP_PORT_RANGE"


def add_nixl_arguments(group: "argparse._ActionsContainer") -> None:
    """Add --kv-ports and --nixl-engine-config."""
    group.add_argument(
        "--kv-ports",
        default="",
        metavar="FIRST-LAST",
        help="TCP ports of KV transfers, such as 20480-24575, by which a network tells them",
    )
    group.add_argument(
        "--nixl-engine-config",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="UCX settings of NIXL without UCX_, such as IB_SL=2 or IB_TRAFFIC_CLASS=106; a UCX_ "
        "variable in the environment wins over them",
    )


def nixl_engine_config(args: argparse.Namespace) -> dict[str, str]:
    """Return the settings of both arguments; raises ``ConfigError``."""
    from dualpath.core.errors import ConfigError
    from dualpath.plan.traffic_class import parse_ports
    from dualpath.transport.ucx_config import parse_engine_config

    config = parse_engine_config(args.nixl_engine_config)
    if args.kv_ports:
        if _PORTS_KEY in config:
            raise ConfigError(
                f"--kv-ports {args.kv_ports} and {_PORTS_KEY}={config[_PORTS_KEY]} say the same "
                "thing; give one of them"
            )
        config[_PORTS_KEY] = parse_ports(args.kv_ports).text
    return config
