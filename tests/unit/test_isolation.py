"""The isolation experiment without a lab: its plan, its messages, its report."""

import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.core.cluster import nodes_text
from dualpath.core.errors import ConfigError
from dualpath.plan.traffic_class import DEFAULT_KV_PORTS
from dualpath.report import markdown
from dualpath_lab.experiments.isolation import (
    P99_TARGET,
    Cell,
    IsolationResult,
    draw,
    percentile,
    size_name,
    slowdown,
    valid,
)
from dualpath_lab.experiments.isolation_exchange import Channel, ExchangeOrder, Rounds
from dualpath_lab.experiments.isolation_settings import (
    EXCHANGE_PORT,
    Case,
    Flow,
    IsolationSettings,
    Leg,
    bulk_ports,
    flows,
)
from dualpath_lab.nodes.cluster import LinkReport
from dualpath_lab.nodes.machine import nodes
from dualpath_sim.harness.experiment import RawData, Run

SIZE = 1 << 20
SETTINGS = IsolationSettings(message_bytes=(SIZE,), legs=(Leg.CNIC,), repeat=3)
LINKS = (LinkReport("CNIC", 125e6, True, "HTB"), LinkReport("SNIC", 50e6, True, "cgroup"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"load": 0.95}, "load is 0.95"),
        ({"repeat": 0}, "repeat is 0"),
        ({"message_bytes": (8,)}, "message_bytes is 8; it must be between 16 and 64MiB"),
        ({"message_bytes": (64, 64)}, "distinct values"),
        ({"legs": ()}, "one or more"),
        ({"lab": "no lab"}, "name is 'no lab'"),
        ({"nodes": "0P2D"}, "nodes is '0P2D'"),
    ],
)
def test_invalid_settings_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        IsolationSettings(**change)  # type: ignore[arg-type]


@given(st.integers(1, 8), st.integers(1, 8), st.integers(16, 1 << 24), st.floats(0.001, 0.9))
def test_rounds_load_every_link_as_configured(
    prefill: int, decode: int, size: int, load: float
) -> None:
    settings = IsolationSettings(
        nodes=nodes_text(prefill, decode), message_bytes=(size,), load=load
    )
    offered = load * settings.link_bytes_per_s
    # Its own messages and its replies to the others' leave a node by one direction of its CNIC.
    sent_bytes = 2 * (prefill + decode - 1) * size
    assert sent_bytes / settings.period_s(Leg.CNIC, size) == pytest.approx(offered)
    assert 2 * size / settings.period_s(Leg.LOOPBACK, size) == pytest.approx(offered)


def test_short_messages_have_more_rounds_for_the_minimum_duration() -> None:
    settings = IsolationSettings(rounds=10, least_run_s=2.0)
    for size in (1 << 10, 1 << 20):
        rounds = settings.rounds_of_run(Leg.CNIC, size)
        period_s = settings.period_s(Leg.CNIC, size)
        assert rounds >= 10
        assert rounds * period_s >= 2.0 - period_s / 2


def test_kv_flows_from_decode_to_prefill_and_h2d_from_a_node_to_itself() -> None:
    lab = nodes(IsolationSettings(nodes="2P1D").lab_settings)
    assert flows(Leg.CNIC, lab) == (Flow("de0", "pe0"), Flow("de0", "pe1"))
    assert flows(Leg.LOOPBACK, lab) == tuple(Flow(n, n) for n in ("pe0", "pe1", "de0"))


def test_only_with_qos_the_bulk_uses_ports_of_the_kv_lane() -> None:
    assert bulk_ports(Case.QOS) == DEFAULT_KV_PORTS
    without = bulk_ports(Case.NO_QOS)
    assert without.last < DEFAULT_KV_PORTS.first
    assert without.last - without.first == DEFAULT_KV_PORTS.last - DEFAULT_KV_PORTS.first
    assert without.first > EXCHANGE_PORT


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    # TCP, as a channel sets options of it.
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    with ours, theirs:
        yield Channel(ours, SIZE), Channel(theirs, SIZE)


def pass_message(sender: Channel, receiver: Channel) -> memoryview:
    """Transfer a message that exceeds a socket's buffer."""
    while (message := receiver.receive()) is None:
        sender.flush()
    assert not sender.is_sending
    return message


def order(rounds: int = 2, warm_up: int = 1) -> ExchangeOrder:
    return ExchangeOrder(SIZE, period_s=10.0, rounds=rounds, warm_up=warm_up, start_s=100.0)


def test_a_round_is_a_message_there_and_back(channels: tuple[Channel, Channel]) -> None:
    ours, theirs = channels
    rounds = Rounds(order())
    assert rounds.seconds_left(97.0) == 3.0
    for begin_s, took_s in ((100.0, 1.0), (110.0, 2.0), (120.0, 12.0)):
        assert rounds.result(begin_s) is None
        rounds.begin([ours], begin_s)
        assert rounds.seconds_left(begin_s) is None
        theirs.send(pass_message(ours, theirs))
        rounds.take(pass_message(theirs, ours), begin_s + took_s)
    result = rounds.result(132.0)
    assert result is not None
    assert (result.round_s, result.late, result.wrong) == ((2.0, 12.0), 1, 0)


def test_a_reply_to_another_round_is_wrong(channels: tuple[Channel, Channel]) -> None:
    ours, theirs = channels
    rounds = Rounds(order(rounds=1, warm_up=0))
    rounds.begin([ours], 100.0)
    reply = pass_message(ours, theirs)
    reply[-1] ^= 1
    rounds.take(reply, 101.0)
    result = rounds.result(101.0)
    assert result is not None
    assert result.wrong == 1


def test_late_rounds_are_not_caught_up(channels: tuple[Channel, Channel]) -> None:
    ours, theirs = channels
    rounds = Rounds(order(rounds=50, warm_up=0))
    rounds.begin([ours], 100.0)
    rounds.take(pass_message(ours, theirs), 599.0)
    assert rounds.result(599.0) is None
    assert rounds.seconds_left(599.0) == 0.0
    result = rounds.result(600.0)
    assert result is not None
    assert len(result.round_s) == 1


def test_a_closed_connection_is_an_error(channels: tuple[Channel, Channel]) -> None:
    ours, theirs = channels
    theirs.socket.close()
    with pytest.raises(ConnectionError):
        ours.receive()


def run(
    case: Case, repetition: int, round_ms: tuple[float, ...], busy: float = 0.3, **wrong: int
) -> Run[IsolationResult]:
    round_s = [one / 1e3 for one in round_ms]
    result = IsolationResult(
        leg=Leg.CNIC,
        case=case,
        message_bytes=SIZE,
        rounds=len(round_s),
        p50_s=percentile(round_s, 50),
        p90_s=percentile(round_s, 90),
        p99_s=percentile(round_s, 99),
        late=0,
        wrong_messages=wrong.get("messages", 0),
        bulk_bytes_per_s=0.0 if case is Case.ALONE else 100e6,
        busy=busy,
        checked_blocks=512,
        wrong_blocks=wrong.get("blocks", 0),
        links=LINKS,
    )
    return Run(cell=cell(case).name, round=repetition, result=result)


def cell(case: Case) -> Cell:
    return Cell(Leg.CNIC, case, SIZE)


def runs_of(alone_ms: tuple[float, ...], qos_ms: tuple[float, ...]) -> list[Run[IsolationResult]]:
    """One run of one round per repetition and case."""
    found = [run(Case.ALONE, i, (ms,)) for i, ms in enumerate(alone_ms)]
    return found + [run(Case.QOS, i, (ms,)) for i, ms in enumerate(qos_ms)]


def raw_data(
    runs: list[Run[IsolationResult]],
) -> RawData[IsolationSettings, IsolationResult]:
    return RawData(experiment="isolation", settings=SETTINGS, runs=runs)


@given(st.lists(st.integers(), min_size=1), st.integers(1, 100))
def test_a_percentile_is_a_value_that_this_share_does_not_exceed(values: list[int], p: int) -> None:
    found = percentile(values, p)
    assert sum(value <= found for value in values) * 100 >= p * len(values)
    assert sum(value < found for value in values) * 100 < p * len(values)


def test_a_slowdown_is_taken_within_a_repetition() -> None:
    # The machine was twice as slow in the second repetition and odd in the third.
    counted = valid(raw_data(runs_of((10, 20, 10), (11, 22, 90))))
    assert slowdown(counted, cell(Case.QOS), 99) == pytest.approx(1.1)


def test_runs_on_a_busy_machine_do_not_count_and_neither_do_their_partners() -> None:
    runs = [*runs_of((10, 10), (11, 11)), run(Case.ALONE, 2, (1,), busy=0.9)]
    runs.append(run(Case.QOS, 2, (99,)))
    counted = valid(raw_data(runs))
    assert len(counted.runs) == len(runs) - 1
    assert slowdown(counted, cell(Case.QOS), 99) == pytest.approx(1.1)


@pytest.mark.parametrize(("qos_ms", "met"), [(10 * P99_TARGET - 0.01, True), (10.6, False)])
def test_the_target_is_the_p99_with_bulk_over_the_p99_alone(qos_ms: float, met: bool) -> None:
    page = draw(raw_data(runs_of((10,), (qos_ms,))))
    assert [target.met for target in page.results] == [met, True]
    assert page.results[0].measured == pytest.approx(qos_ms / 10)


def test_without_a_valid_run_the_target_is_missed() -> None:
    page = draw(raw_data([run(case, 0, (1.0,), busy=0.99) for case in Case]))
    assert page.results[0].measured is None
    assert not page.results[0].met
    assert "3 left out" in markdown.page(page.report())
    assert {cell for row in page.tables[0].rows for cell in row[1:]} == {"-"}


def test_wrong_bytes_miss_their_own_target() -> None:
    runs = [*runs_of((10,), (10,)), run(Case.NO_QOS, 0, (20,), messages=2, blocks=3)]
    page = draw(raw_data(runs))
    assert page.results[1].measured == 5
    assert not page.results[1].met


def test_a_page_compares_every_case_with_alone() -> None:
    page = draw(raw_data([*runs_of((10,), (10.2,)), run(Case.NO_QOS, 0, (25,))]))
    rows = {row[0]: row for row in page.tables[0].rows}
    assert rows["bulk, no QoS, 1 MiB"][5] == "2.500"
    assert rows["bulk, QoS, 1 MiB"][5] == "1.020"
    # 100 MB/s on the two links from DEs to PEs of a 2P2D lab.
    assert rows["bulk, QoS, 1 MiB"][7] == "40%"
    assert page.panels[0].series[1].y == pytest.approx((10, 25, 10.2))


def test_sizes_have_units() -> None:
    assert [size_name(size) for size in (100, 64 << 10, 1 << 20)] == ["100 B", "64 KiB", "1 MiB"]
