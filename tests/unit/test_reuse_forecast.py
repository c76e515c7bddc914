"""Forecasts of when a chain is used again decide only where intervals repeat."""

from dualpath.policy.reuse import ReuseForecast


def taught(*intervals: int) -> ReuseForecast:
    """Return what a buffer knows of one chain with these intervals."""
    forecast, before = ReuseForecast(64), 0
    for interval in intervals:
        forecast.learn(interval, before)
        before = interval
    return forecast


def test_no_forecast_is_used_before_an_interval_was_forecast() -> None:
    assert not taught().believed
    assert not taught(10).believed


def test_forecasts_are_used_for_repeating_intervals_only() -> None:
    assert taught(*[10] * 8).believed
    assert taught(*[8, 12] * 8).believed
    assert not taught(*[1, 100] * 8).believed


def test_a_buffer_unlearns_what_does_not_repeat_any_more() -> None:
    assert taught(*[10] * 64, *[1, 40] * 32).believed is False
    assert taught(*[1, 40] * 32, *[10] * 640).believed is True


def test_a_chain_of_unknown_interval_is_expected_after_the_mean_of_all() -> None:
    forecast = taught(*[40] * 2000)
    assert forecast.expected(7) == 7
    assert 38 <= forecast.expected(0) <= 40


def test_a_chain_is_given_up_after_twice_its_interval() -> None:
    forecast = taught(*[40] * 4)
    assert not forecast.given_up(20, 10)
    assert forecast.given_up(21, 10)
