"""Plots of links of many nodes."""

from dualpath.report.model import Series
from dualpath_lab.experiments.runs import merged_by_role


def line(name: str, *y: float | None) -> Series:
    return Series(name, tuple(float(x) for x in range(len(y))), y)


def test_few_nodes_have_a_line_each() -> None:
    nodes = [line("pe0", 1.0), line("de0", 2.0), line("de1", 3.0)]
    assert merged_by_role(nodes) == tuple(nodes)


def test_many_nodes_are_drawn_by_role_with_their_range() -> None:
    nodes = [
        line("pe0", 10.0, 4.0, None),
        line("pe1", 20.0, 4.0, None),
        line("de0", 1.0, 0.0, 5.0),
        line("de1", 2.0, 0.0, None),
        line("de2", 6.0, 9.0, 7.0),
    ]
    prefill, decode = merged_by_role(nodes)
    assert (prefill.name, prefill.x, prefill.y) == ("mean of 2 PEs", (0, 1, 2), (15, 4, None))
    assert (decode.name, decode.y) == ("mean of 3 DEs", (3, 3, 6))
    assert (decode.low, decode.high) == ((1, 0, 5), (6, 9, 7))
