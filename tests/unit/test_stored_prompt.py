"""The parts of a stored prompt's TTFT, from engines' traces."""

import pytest

from dualpath_lab.benchmarks.overhead.between_passes import Span
from dualpath_lab.benchmarks.overhead.client import Response
from dualpath_lab.benchmarks.overhead.stored_prompt import (
    TtftParts,
    covered_s,
    time_parts,
    without,
)


def span(start_s: float, end_s: float) -> Span:
    return Span("a", start_s, end_s, {})


def response(start_s: float, first_s: float) -> Response:
    return Response(start_s, first_s, event_s=[first_s], prompt_tokens=1, tokens=1)


def test_overlapping_spans_count_once_and_only_within_the_period() -> None:
    spans = [span(5, 6), span(0, 2), span(3, 5.5), span(3.5, 4), span(9, 12), span(14, 15)]
    assert covered_s(spans, start_s=1, end_s=10) == 1 + 3 + 1


def test_time_without_transfer_or_computation_is_other() -> None:
    prefill = {"load": [span(13, 15)], "compute": [span(14, 17)], "pass": [span(11, 20)]}
    decode = {"storage": [span(11, 13)], "h2d": [span(17, 19)]}
    prefill["send"] = [span(16.5, 17)]
    parts = time_parts(response(10.0, 20.0), prefill, decode)
    assert parts.ttft_s == pytest.approx(10.0)
    assert parts.transfers_s == pytest.approx(4.5)
    assert parts.computation_s == pytest.approx(1.5)
    assert parts.other_s == pytest.approx(4.0)


def test_reads_of_all_threads_of_both_engines_are_transfers() -> None:
    prefill = {"storage": [span(2, 3)], "storage 15": [span(3, 4)], "storage-write": [span(4, 9)]}
    decode = {"storage 1": [span(3.5, 5)], "storage 2": [span(6, 7)]}
    parts = time_parts(response(0.0, 10.0), prefill, decode)
    assert parts.transfers_s == pytest.approx(4.0)
    assert parts.reads_s == pytest.approx(1.0)


def test_other_is_the_sum_of_the_gaps_in_five_periods() -> None:
    compared = Span("compare", 3.25, 3.5, {})
    prefill = {
        "storage 3": [span(1, 2), span(0.0, 0.2)],  # the second one is of an earlier request
        "engine": [compared, Span("pass", 3.5, 8, {})],
        "load": [span(4, 5), span(6, 6.5)],
        "send": [span(6.75, 7)],
        "compute": [span(5, 6.75)],
        "wait": [span(5.25, 6)],
    }
    parts = time_parts(response(0.5, 9.0), prefill, {"storage": [span(2.5, 3)]})
    assert parts == pytest.approx(
        TtftParts(
            ttft_s=8.5,
            transfers_s=1.0 + 0.5 + 1.0 + 0.5 + 0.25,
            computation_s=0.25 + 0.25 + 0.25,
            other_s=0.5 + 0.5 + 0.75 + 0.75 + 2.0,
            to_read_s=0.5,
            reads_s=0.5,
            to_load_s=0.75,
            layers_s=0.75,
            to_token_s=2.0,
        )
    )


def test_no_time_is_to_the_first_load_where_loads_begin_before_the_last_read_ends() -> None:
    prefill = {"storage": [span(1, 5)], "load": [span(4, 6)], "send": [span(6.5, 7)]}
    parts = time_parts(response(0.0, 8.0), prefill, {})
    assert parts.to_load_s == pytest.approx(0.0)
    assert parts.layers_s == pytest.approx(0.5)
    assert parts.other_s == pytest.approx(1.0 + 0.5 + 1.0)


def test_a_prompt_without_stored_blocks_has_no_reads() -> None:
    parts = time_parts(response(1.0, 9.0), {"send": [span(4, 5)]}, {})
    assert (parts.to_read_s, parts.reads_s) == (0.0, 0.0)
    assert parts.to_load_s == pytest.approx(3.0)


def test_holes_divide_spans() -> None:
    left = without([span(0, 10), span(20, 30)], [span(2, 3), span(5, 6), span(9, 21), span(30, 40)])
    found = sorted((one.start_s, one.end_s) for one in left)
    assert found == [(0, 2), (3, 5), (6, 9), (21, 30)]
