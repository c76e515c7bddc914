"""Arguments of the routers that say who may speak to them, and how much."""

import argparse


def add_secret_argument(group: "argparse._ActionsContainer") -> None:
    """Add --cluster-secret-file."""
    group.add_argument(
        "--cluster-secret-file",
        default="",
        metavar="FILE",
        help="secret of router and engines; default: DUALPATH_CLUSTER_SECRET of the environment. "
        "Without one the control address must be a loopback address",
    )


def add_client_arguments(parser: argparse.ArgumentParser) -> "argparse._ArgumentGroup":
    """Add the clients' keys and limits; return their group."""
    group = parser.add_argument_group("clients")
    group.add_argument(
        "--api-key",
        nargs="+",
        default=[],
        metavar="KEY",
        help="what clients have to show, as vLLM has it; default: VLLM_API_KEY of the environment",
    )
    group.add_argument(
        "--max-body-mib", type=int, default=64, help="larger HTTP bodies are refused (413)"
    )
    group.add_argument(
        "--max-prompt-tokens", type=int, help="longer prompts are refused (400); default: context"
    )
    group.add_argument(
        "--max-concurrent-requests", type=int, default=4096, help="further requests wait"
    )
    group.add_argument(
        "--max-waiting-requests", type=int, default=4096, help="further requests get status 429"
    )
    return group
