"""Reports as Markdown text, which also reads well in a terminal."""

from collections.abc import Sequence

from dualpath.model.evaluation.report import (
    FigureReport,
    Statement,
    Table,
    comparison_table,
    statement_table,
)


def table(content: Table, level: int = 3) -> str:
    """Return a heading and a table whose columns line up."""
    cells = [list(map(_escaped, row)) for row in (content.columns, *content.rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(content.columns))]
    numeric = [_is_numeric([row[index] for row in content.rows]) for index in range(len(widths))]
    lines = [_row(row, widths, numeric) for row in cells]
    rule = [
        "-" * (width + 1) + ":" if right else "-" * (width + 2)
        for width, right in zip(widths, numeric, strict=True)
    ]
    lines.insert(1, f"|{'|'.join(rule)}|")
    return "\n".join([f"{'#' * level} {content.title}", "", *lines])


def report(content: FigureReport, level: int = 1, picture: str | None = None) -> str:
    """Return a whole report; ``picture`` is the plot's address relative to the text."""
    parts = [
        f"{'#' * level} {heading(content)}",
        "\n".join(f"- {line}" for line in setting_lines(content)),
    ]
    if content.compared:
        parts.append(
            table(comparison_table(content.compared, quick=content.evaluation.quick), level + 1)
        )
    if content.statements:
        parts.append(table(statement_table(content.statements), level + 1))
    if picture is not None:
        parts.append(f"![{content.title}]({picture})")
    parts += [table(one, level + 1) for one in content.tables]
    if content.discussion:
        parts.append(f"{'#' * (level + 1)} Discussion\n\n{content.discussion.strip()}")
    return "\n\n".join(parts) + "\n"


def heading(content: FigureReport) -> str:
    """Return "Fig. 7. Title", or the title alone of what is no figure."""
    if not content.name.startswith(("fig", "table")):
        return content.title
    number = content.name.replace("fig", "Fig. ").replace("table", "Table ").capitalize()
    return f"{number}. {content.title}"


def setting_lines(content: FigureReport) -> tuple[str, ...]:
    """Return the settings, seed and tail, and a warning where the run was a quick one."""
    chosen = content.evaluation
    workload = (
        f"Seed {chosen.seed}. Generated trajectories have the means of Table 2; their turns follow "
        f"a {chosen.tail} distribution, which the table leaves open."
    )
    quick = ("Quick: small grids, not the paper's settings.",) if chosen.quick else ()
    return (*content.settings, workload, *quick)


def all_statements(reports: Sequence[FigureReport]) -> list[Statement]:
    """Return the statements of all reports in order."""
    return [statement for content in reports for statement in content.statements]


def _row(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = [
        cell.rjust(width) if is_right else cell.ljust(width)
        for cell, width, is_right in zip(cells, widths, right, strict=True)
    ]
    return f"| {' | '.join(padded)} |"


def _is_numeric(cells: Sequence[str]) -> bool:
    return all(cell[:1] in "0123456789+-≈<≥x" for cell in cells) and bool(cells)


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")
