"""Reports on terminals: tables, notes and warnings, without prose and plots."""

import errno
import sys

import rich.table
from rich.console import Console
from rich.text import Text

from dualpath.report.model import Block, Notes, Report, Table

#: Columns if the output is not a terminal.
_PLAIN_WIDTH = 160


class _Terminal(Console):
    def on_broken_pipe(self) -> None:
        """Let the command end as it does for every output (``cli.main``)."""
        raise BrokenPipeError(errno.EPIPE, "standard output has no reader")


def terminal() -> Console:
    """Return a console on standard output."""
    return _Terminal(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)


def print_report(report: Report, console: Console | None = None) -> None:
    """Print a report without its title."""
    console = console or terminal()
    for line in report.headline:
        console.print(Text(line, style="bold"), soft_wrap=True)
    if report.headline:
        console.print()
    print_blocks(*report.blocks, console=console)
    for warning in report.warnings:
        console.print(Text(f"warning: {warning}", style="bold"))
    for part in report.parts:
        print_report(part, console)


def print_blocks(*blocks: Block, console: Console | None = None) -> None:
    """Print tables and notes, separated by blank lines except notes directly below a table."""
    console = console or terminal()
    above: Block | None = None
    for block in blocks:
        if not isinstance(block, Table | Notes):
            continue
        if above is not None and not (isinstance(above, Table) and isinstance(block, Notes)):
            console.print()
        above = block
        if isinstance(block, Table):
            _print_table(block, console)
        else:
            for line in block.lines:
                console.print(Text(line))


def _print_table(table: Table, console: Console) -> None:
    if table.title:
        console.print(Text(table.title, style="bold"))
    grid = rich.table.Table(show_edge=False, pad_edge=False)
    for column, right in zip(table.columns, table.right, strict=True):
        grid.add_column(Text(column), justify="right" if right else "left")
    for index, row in enumerate(table.rows):
        if index in table.rules:
            grid.add_section()
        grid.add_row(*map(Text, row))
    console.print(grid)
