"""The parts of a stored prompt's TTFT, from engines' traces."""

import pytest

from dualpath_lab.benchmarks.overhead.between_passes import Span
from dualpath_lab.benchmarks.overhead.client import Response
from dualpath_lab.benchmarks.overhead.stored_prompt import covered_s, time_parts


def span(start_s: float, end_s: float) -> Span:
    return Span("a", start_s, end_s, {})


def test_overlapping_spans_count_once_and_only_within_the_period() -> None:
    spans = [span(5, 6), span(0, 2), span(3, 5.5), span(3.5, 4), span(9, 12), span(14, 15)]
    assert covered_s(spans, start_s=1, end_s=10) == 1 + 3 + 1


def test_time_without_transfer_or_computation_is_the_rest() -> None:
    response = Response(start_s=10.0, first_s=20.0, event_s=[20.0], prompt_tokens=1, tokens=1)
    prefill = {"load": [span(13, 15)], "compute": [span(14, 17)], "wait": [span(11, 20)]}
    decode = {"storage": [span(11, 13)], "send": [span(16.5, 17)]}
    ttft_s, transfers_s, computed_s, rest_s = time_parts(response, [prefill, decode])
    assert ttft_s == pytest.approx(10.0)
    assert transfers_s == pytest.approx(4.5)
    assert computed_s == pytest.approx(1.5)
    assert rest_s == pytest.approx(4.0)
