"""``dualpath report RUN.json …``: runs of ``dualpath replay`` side by side."""

import argparse
import importlib.util
import sys

_PLAIN_WIDTH = 160


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the ``report`` command."""
    parser = subparsers.add_parser(
        "report",
        help="compare replay results",
        description="Print the results of several replays side by side, with ratios to the runs "
        "in modes basic and oracle, and optionally write them as one HTML page.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN.json", help="--out files of replays")
    parser.add_argument("--html", metavar="FILE.html", help="write a page with plots")
    parser.add_argument("--title", default="dualpath replay", help="title of the page")


def run(args: argparse.Namespace) -> int:
    """Print the comparison, write the page if asked for; return 0.

    Raises ``ConfigError`` for a file that is no replay result or cannot be written.
    """
    from rich.console import Console

    from dualpath.core.errors import ConfigError
    from dualpath.laboratory.workload.replay.result import read_result
    from dualpath.laboratory.workload.report import compare, print_comparison

    results = [read_result(path) for path in args.runs]
    if args.html:
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("--html draws with matplotlib; pip install 'dualpath[report]'")
        from dualpath.laboratory.workload.html_report import write_html

        write_html(results, args.html, args.title)
    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    print_comparison(compare(results), console)
    return 0
