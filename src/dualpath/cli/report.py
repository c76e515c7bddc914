"""``dualpath report RUN.json …``: compares runs of ``dualpath replay``."""

import argparse

from dualpath.cli.main import OutputPath


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the ``report`` command."""
    parser = subparsers.add_parser(
        "report",
        help="compare replay results",
        description="Print the results of several replays side by side, with ratios to the runs "
        "in modes basic and oracle, and optionally write them as one HTML page.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN.json", help="--json files of replays")
    parser.add_argument(
        "--html", type=OutputPath, metavar="FILE.html", help="write a page with plots"
    )
    parser.add_argument("--title", default="dualpath replay", help="title of the page")


def run(args: argparse.Namespace) -> int:
    """Print the comparison, write the page if requested; return 0.

    Raises ``ConfigError`` for a file that is not a replay result or cannot be written.
    """
    from dualpath.cli.output import warn_if_no_plots
    from dualpath.report.files import write_page
    from dualpath.report.text import print_report
    from dualpath.workload.replay.report import compare
    from dualpath.workload.replay.result import read_result

    warn_if_no_plots(args.html)
    report = compare([read_result(path) for path in args.runs], args.title)
    if args.html:
        write_page(report, args.html)
    print_report(report)
    return 0
