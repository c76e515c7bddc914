"""The demo: agents that start in mid-session, the storage rate, the time left."""

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from tests.unit.test_workload_report import result
from tests.unit.workload_server import BLOCK_TOKENS, FakeServer, served

from dualpath.cli import router
from dualpath.core.blocks import BlockGeometry, StoreNamespace
from dualpath.core.errors import ConfigError, DeadlineError
from dualpath.core.modes import DEFAULT_MODE, Mode
from dualpath.core.request import Round, Trajectory
from dualpath.launch.commands import router_command
from dualpath.launch.settings import LocalClusterSettings
from dualpath.storage.contract import BlockStorage
from dualpath.storage.factory import open_storage
from dualpath.storage.posix import PosixStorage, copy_lengths
from dualpath.workload.conversation.prompts import Contents, Vocabulary
from dualpath.workload.conversation.sessions import AgentSettings, Session
from dualpath.workload.conversation.text_session import Message, TextSession, TextTurn
from dualpath.workload.conversation.token_session import TokenSession
from dualpath.workload.replay.client import ReplayOptions, replay
from dualpath.workload.replay.result import ReplayResult
from dualpath_lab.demo.run import LOAD_SHARE, DemoRun, TimeLeft, choose_rate
from dualpath_lab.demo.sessions import MidSessionAgent, mid_session_agents
from dualpath_lab.demo.settings import DemoSettings, cluster_settings, history_settings

GEOMETRY = BlockGeometry.uniform(2, 64, 512)
NAMESPACE = StoreNamespace(model="m", dtype="float32", layout="l", geometry=GEOMETRY)


def encode(text: str) -> list[int]:
    """One token per character."""
    return [ord(character) for character in text]


def first_prompts(agent: MidSessionAgent) -> tuple[list[int], list[int]]:
    """Return the stored tokens and the prompt of the first turn."""
    contents = Contents(Vocabulary(encode=encode))
    history, rest = (s.start(AgentSettings(), contents) for s in (agent.history, agent.rest))
    stored, sent = history.next_turn(), rest.next_turn()
    assert stored is not None
    assert sent is not None
    return history.token_ids(stored), rest.token_ids(sent)


def rounds(name: str, *pairs: tuple[int, int]) -> TokenSession:
    return TokenSession(Trajectory(name, tuple(Round(a, g) for a, g in pairs)))


def talk(name: str, *sizes: int, tail: bool = False) -> TextSession:
    """A turn appends an answer and a result of ``sizes`` characters; ``tail`` is dropped."""
    messages, turns = [Message("system", "s" * 50)], []
    for index, size in enumerate(sizes):
        messages += [Message("assistant", "a" * 10), Message("tool", chr(65 + index) * size)]
        reminder = [Message("user", f"turn {index}")] if tail else []
        turns.append(TextTurn((*messages, *reminder), generate_tokens=4))
    return TextSession(name, tuple(turns))


@pytest.mark.parametrize("tail", [False, True])
def test_an_agent_of_text_continues_after_the_last_tokens_of_its_context(tail):
    (agent,) = mid_session_agents([talk("t", 100, 100, 5, 5, 100, tail=tail)], 1, 2, 60, encode)

    assert agent.rest.session_id == agent.history.session_id == "t@2"
    assert agent.rest.turns == 2
    stored, sent = first_prompts(agent)
    # The next turn continues all but the reminder and the opening of the answer.
    shared = len(stored) - len("turn 1<|im_end|>\n<|im_start|>user\n" if tail else "") - 30
    assert sent[:shared] == stored[:shared]
    text = "".join(map(chr, stored))
    assert "s" * 50 not in text
    assert "B" * (60 - len("turn 1" if tail else "")) in text
    assert "B" * 61 not in text


def test_agents_of_token_counts_have_their_history_as_a_prefix():
    session = rounds("r", (500, 5), (300, 5), (7, 5), (9, 5), (400, 5))
    (agent,) = mid_session_agents([session], 1, 2, 256, encode)

    assert agent.rest.session_id == "r@2"
    stored, sent = first_prompts(agent)
    assert len(stored) == 256
    assert len(sent) == 256 + 7
    assert sent[:256] == stored


def test_windows_that_append_least_are_chosen_and_no_turn_twice():
    session = rounds("r", (500, 1), (90, 1), (1, 1), (2, 1), (3, 1), (80, 1))
    names = [agent.rest.session_id for agent in mid_session_agents([session], 2, 2, 64, encode)]
    assert names == ["r@2", "r@4"]


def test_windows_in_which_an_agent_edits_its_history_are_skipped():
    plain = talk("t", 100, 100, 5)
    edited = (Message("system", "other"), *plain.text_turns[2].messages[1:])
    turns = (*plain.text_turns[:2], msgspec.structs.replace(plain.text_turns[2], messages=edited))
    with pytest.raises(ConfigError, match=r"0 windows of 1 turns.*use fewer agents"):
        mid_session_agents([TextSession("t", turns[1:])], 1, 1, 60, encode)


def test_sessions_that_cannot_start_in_the_middle_are_refused():
    class Blocks:
        session_id, turns = "b", 3

    blocks: list[Session] = [Blocks()]  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="session b cannot be started in the middle"):
        mid_session_agents(blocks, 1, 1, 64, encode)


def test_a_replay_counts_stored_histories_as_ideal_hits():
    (agent,) = mid_session_agents([rounds("r", (500, 5), (9, 5))], 1, 1, 256, encode)
    with served(FakeServer()) as endpoint:
        options = ReplayOptions(run_id="same")
        play([agent.history], endpoint, options)
        without = play([agent.rest], endpoint, options)
        known = play([agent.rest], endpoint, options, histories=[agent.history])
    assert [turn.ideal_hit_tokens for turn in without.turns] == [0]
    assert [turn.ideal_hit_tokens for turn in known.turns] == [256]
    assert known.turns[0].hit_tokens is not None
    assert known.turns[0].hit_tokens >= 256


def play(
    sessions: list[Session],
    endpoint: str,
    options: ReplayOptions,
    histories: Sequence[Session] = (),
) -> ReplayResult:
    return asyncio.run(replay(sessions, endpoint, options, histories=histories))


def test_the_rate_makes_one_path_take_its_share_of_oracles_time():
    oracle = result("oracle", 10.0)
    blocks = (oracle.summary.hit_tokens or 0) // 64
    assert blocks > 0
    chosen = choose_rate(oracle, NAMESPACE, prefill=2)
    assert chosen.load_bytes == blocks * GEOMETRY.full_block_bytes
    assert chosen.load_bytes / (2 * chosen.bytes_per_s) == pytest.approx(LOAD_SHARE * 10.0)
    assert "Oracle's run took 10.0 s" in chosen.line()


def test_without_oracle_the_rate_has_to_be_given():
    with pytest.raises(ConfigError, match="add it or set"):
        DemoSettings(mode=(Mode.BASIC, Mode.DUALPATH)).check()
    DemoSettings(mode=(Mode.BASIC, Mode.DUALPATH), snic_bytes_per_s=2e7).check()
    assert DemoSettings().in_order == (Mode.ORACLE, Mode.BASIC, DEFAULT_MODE)


def test_time_left_is_scaled_by_finished_stages():
    now_s = 0.0
    left = TimeLeft({"start": 10.0, "warm": 20.0, "run": 30.0}, lambda: now_s)
    left.begin("start")
    assert left.left_s() == 60.0
    now_s = 20.0
    left.begin("warm")  # twice as slow as expected
    assert left.left_s() == 100.0
    assert left.left_s(done=0.5) == 80.0
    left.expect("run", 5.0)
    assert left.left_s(done=1.0) == pytest.approx(5.0)


def test_oracle_hits_what_a_real_storage_holds(tmp_path):
    real = PosixStorage(tmp_path / "real", NAMESPACE)
    keys = [bytes([index]) * 32 for index in range(3)]
    real.write(keys, [memoryview(bytes(GEOMETRY.full_block_bytes))] * 3)

    assert copy_lengths(tmp_path / "real", tmp_path / "lengths") == 3

    lengths = open_storage(tmp_path / "lengths", NAMESPACE, mode=Mode.ORACLE)
    assert all(lengths.is_stored(key) for key in keys)
    assert not lengths.is_stored(b"\7" * 32)
    assert copy_lengths(tmp_path / "real", tmp_path / "lengths") == 0


class StoringServer(FakeServer):
    """A server with its blocks in a storage, like engines."""

    def __init__(self, storage: BlockStorage) -> None:
        super().__init__()
        self._storage = storage

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        keys = self._keys(body["prompt"], body.get("cache_salt"))
        self.stored |= {key for key in keys if self._storage.is_stored(key)}
        answer = await super().completions(request)
        blank = memoryview(bytes(SERVED.geometry.full_block_bytes))
        for key in self.stored:
            self._storage.write([key], [blank])
        return answer


class FakeCluster:
    """A cluster with a server in a thread as its engines; ``events`` records starts and ends."""

    def __init__(self, settings: LocalClusterSettings, events: list[str]) -> None:
        self.settings = settings
        self.endpoint = ""
        self._name = Path(settings.storage).name
        self._events = events
        self._running = ExitStack()

    def launch(self) -> None:
        self._events.append(f"{self._name} starts at {self.settings.snic_bytes_per_s:.0f}")
        storage = Path(self.settings.storage)
        self._opened = open_storage(storage, SERVED, mode=self.settings.mode)

    def wait_ready(self) -> None:
        self.endpoint = self._running.enter_context(served(StoringServer(self._opened)))

    def stop(self) -> None:
        self._events.append(f"{self._name} ends")
        self._running.close()


SERVED = msgspec.structs.replace(NAMESPACE, geometry=BlockGeometry.uniform(2, BLOCK_TOKENS, 512))


def test_every_mode_starts_from_the_same_histories_at_the_rate_that_oracle_gave(tmp_path):
    sessions = [rounds(name, (500, 5), (9, 5), (9, 5)) for name in "ab"]
    agents = mid_session_agents(sessions, 2, 2, 256, encode)
    events: list[str] = []
    demo = DemoSettings(agents=2, max_turns=2, history_tokens=256, max_context_tokens=4096)

    with DemoRun(
        demo, tmp_path, agents, "t", tmp_path / "out", encode, lambda text: None,
        lambda settings: FakeCluster(settings, events),
    ) as demo_run:  # fmt: skip
        results = {result.setting.label: result for result in demo_run.results()}

    assert demo_run.chosen is not None
    rate = f"{demo_run.chosen.bytes_per_s:.0f}"
    assert events == [
        *("histories starts at 0", "oracle starts at 0", "histories ends"),
        *(f"basic starts at {rate}", f"{DEFAULT_MODE} starts at {rate}", "oracle ends"),
        *("basic ends", f"{DEFAULT_MODE} ends"),
    ]
    assert list(results) == ["oracle", "basic", DEFAULT_MODE]
    for played in results.values():
        assert not played.failed
        assert played.summary.hit_tokens == played.summary.ideal_hit_tokens
        assert played.summary.hit_rate is not None
        assert played.summary.hit_rate >= 0.9


def test_histories_are_computed_on_every_core_that_a_mode_will_use(tmp_path):
    demo = DemoSettings(nodes="1P2D")
    histories = history_settings(demo, tmp_path, str(tmp_path), tmp_path / "out", "histories")
    assert histories.nodes == "3P1D"
    assert (
        histories.dtype
        == cluster_settings(
            Mode.DUALPATH, demo, tmp_path, str(tmp_path), tmp_path / "out", 1e6
        ).dtype
    )
    # Alternating, so that no engine gets more than its share; without a rate limit.
    assert (histories.mode, histories.snic_bytes_per_s) == (Mode.BASIC, 0.0)


def test_no_read_times_out_however_slow_storage_is(tmp_path):
    settings = cluster_settings(
        Mode.BASIC, DemoSettings(), tmp_path, str(tmp_path), tmp_path / "out", 1e6
    )
    _, *words = router_command(settings, 8000, 5700)
    given = argparse.ArgumentParser(prog="dualpath")
    router.add_parser(given.add_subparsers())
    command, _ = router.settings_of(given.parse_args(["router", *words]))
    # All agents' hits at once, at the rate of a machine that takes three minutes for Oracle.
    assert command.read_deadline_s >= LOAD_SHARE * 180


def test_histories_that_are_not_stored_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("dualpath_lab.demo.run._STORED_TIMEOUT_S", 0.0)
    agents = mid_session_agents([rounds("a", (500, 5), (9, 5))], 1, 1, 256, encode)
    demo = DemoSettings(agents=1, max_turns=1, history_tokens=256, max_context_tokens=4096)
    events: list[str] = []

    class Forgetful(FakeCluster):
        def wait_ready(self) -> None:
            self.endpoint = self._running.enter_context(served(FakeServer()))

    with (
        pytest.raises(DeadlineError, match="0 of 64 blocks of histories were stored"),
        DemoRun(
            demo, tmp_path, agents, "t", tmp_path / "out", encode, lambda text: None,
            lambda settings: Forgetful(settings, events),
        ) as demo_run,
    ):  # fmt: skip
        list(demo_run.results())
    assert events[-2:] == ["histories ends", "oracle ends"]
