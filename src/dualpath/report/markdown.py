"""Reports as Markdown, with aligned tables that are readable as source."""

from collections.abc import Sequence

import msgspec

from dualpath.report.model import Block, Notes, Plots, Report, Table, Text


def page(report: Report, folder: str = "", level: int = 1, no_plots_reason: str = "") -> str:
    """Return a whole report; its pictures are PNG files in ``folder``, which ends with ``/``.

    ``level`` is that of its heading.  ``no_plots_reason`` replaces the pictures, if it is given.
    """
    parts = ["#" * level + f" {report.title}"]
    if report.headline:
        parts.append(" ".join([f"**{report.headline[0]}**", *report.headline[1:]]))
    parts += [f"**Warning: {warning}**" for warning in report.warnings]
    names = (name for name, _ in msgspec.structs.replace(report, parts=()).pictures())
    for block in report.blocks:
        picture = f"{folder}{next(names)}.png" if isinstance(block, Plots) else ""
        parts.append(_block(block, picture, level + 1, no_plots_reason))
    parts += [page(part, folder, level + 1, no_plots_reason).strip("\n") for part in report.parts]
    return "\n\n".join(parts) + "\n"


def table(content: Table, level: int = 3) -> str:
    """Return an aligned table, below its title as a heading if it has one."""
    cells = [list(map(_escaped, row)) for row in (content.columns, *content.rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(content.columns))]
    right = content.right
    lines = [_row(row, widths, right) for row in cells]
    rule = [
        "-" * (width + 1) + ":" if is_right else "-" * (width + 2)
        for width, is_right in zip(widths, right, strict=True)
    ]
    lines.insert(1, f"|{'|'.join(rule)}|")
    return "\n".join([*_heading(content.title, level), *lines])


def _block(block: Block, picture: str, level: int, no_plots_reason: str) -> str:
    match block:
        case Table():
            return table(block, level)
        case Text():
            return "\n".join([*_heading(block.heading, level), block.text.strip()])
        case Notes():
            return "\n".join(f"- {line}" for line in block.lines)
        case Plots():
            return (
                f"{block.caption}: {no_plots_reason}"
                if no_plots_reason
                else f"![{block.caption}]({picture})"
            )


def _heading(text: str, level: int) -> list[str]:
    return ["#" * level + f" {text}", ""] if text else []


def _row(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = [
        cell.rjust(width) if is_right else cell.ljust(width)
        for cell, width, is_right in zip(cells, widths, right, strict=True)
    ]
    return f"| {' | '.join(padded)} |"


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")
