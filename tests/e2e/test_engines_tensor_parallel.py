"""Real engines of two ranks and of one: each reads the blocks that the others have stored."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.e2e.engine_cluster import EngineCluster, tiny_cluster_settings
from tests.e2e.plain_engine import (
    Answer,
    Completion,
    PlainEngine,
    Round,
    Truth,
    play_plain,
    tiny_model,
    until,
)
from tests.guard import GUARD_S

from dualpath.core.cluster import Role
from dualpath.launch.process import local
from dualpath_lab.models.random_models import MLA_COMPILATION_CONFIG, make_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

#: On a CPU with AMX vLLM would choose a backend that takes no float32.
LATENT_ARGS = (
    *("--compilation-config", json.dumps(MLA_COMPILATION_CONFIG)),
    *("--attention-backend", "CPU_MLA"),
)
#: Turns with which the engines of the other kind begin.
HALF = 2
#: Tokens of an answer before the fault.
FEW = 20


class Talk:
    """An agent with turns that one cluster after the other serves."""

    def __init__(self, rounds: list[Round], salt: str) -> None:
        self._rounds = rounds
        self._salt = salt
        self.context: list[int] = []
        self.answers: list[Answer] = []

    def go_on(self, cluster: EngineCluster, turns: int) -> None:
        """Play some turns; each waits until what the one before computed is stored."""
        for append, generate in self._rounds[len(self.answers) :][:turns]:
            self.context += append
            answer = cluster.ask(self.context, generate, self._salt)
            self.answers.append(answer)
            self.context += answer.token_ids
            cluster.wait_stored(self.context[:-1], self._salt)


@pytest.fixture(scope="module")
def cluster(truth: Truth, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCluster]:
    """Without engines; ``truth`` only in order to start after the plain engine has ended."""
    folder = tmp_path_factory.mktemp("tensor_parallel")
    settings = tiny_cluster_settings(tiny_model(), folder / "storage")
    with EngineCluster(settings, folder) as cluster:
        yield cluster


def test_engines_of_any_ranks_go_on_with_each_others_blocks(
    cluster: EngineCluster, agents: list[list[Round]], truth: Truth
) -> None:
    talk = Talk(agents[0], "talk")
    first = [
        cluster.start_engine(Role.PREFILL, 0, prefill_tp=2),
        cluster.start_engine(Role.DECODE, 0),
    ]
    cluster.wait_for(*first)
    talk.go_on(cluster, HALF)
    begun = agents[0][:HALF], truth.turns[0][:HALF]
    assert [a.token_ids for a in talk.answers] == begun[1]
    assert cluster.ask_without_hits(*begun) == (begun[1][-1], 0)
    cluster.wait_idle()
    for name in first:  # they drain: the ranks of an engine end together
        cluster.supervisor.process(name).terminate()
    for name in first:
        assert cluster.supervisor.process(name).wait(GUARD_S) == 0
    second = [
        cluster.start_engine(Role.PREFILL, 1),
        cluster.start_engine(Role.DECODE, 1, decode_tp=2),
    ]
    cluster.wait_for(*second)
    talk.go_on(cluster, len(agents[0]))
    assert [a.token_ids for a in talk.answers] == truth.turns[0]
    assert [a.cached_tokens for a in talk.answers] == cluster.expected_hits(agents[0])
    assert cluster.ask_without_hits(agents[0], truth.turns[0]) == (truth.turns[0][-1], 0)
    cluster.wait_idle()
    assert cluster.total("transfer_failures") == cluster.total("persist_dropped_blocks") == 0


def test_whichever_rank_is_killed_its_engine_ends_and_the_request_is_answered(
    cluster: EngineCluster, agents: list[list[Round]], truth: Truth
) -> None:
    """Two ranks at both sides; the last test of its cluster."""
    drained = cluster.supervisor.process("pe-1")
    drained.terminate()
    pe, de = cluster.start_engine(Role.PREFILL, 2, prefill_tp=2), "de-1"
    cluster.wait_for(pe)
    assert drained.wait(GUARD_S) == 0
    talk = Talk(agents[1], "two ranks at both sides")
    talk.go_on(cluster, HALF)
    for name, rank in ((pe, 0), (pe, 1), (de, 0), (de, 1)):
        request = computed_in_part(cluster, truth.long_prompt, f"rank {rank} of {name}")
        lose_rank(cluster, name, rank)
        cluster.restart(name)
        assert request.answer().token_ids == truth.long_answer[:FEW]
    talk.go_on(cluster, len(agents[1]))
    assert [a.token_ids for a in talk.answers] == truth.turns[1]
    assert [a.cached_tokens for a in talk.answers] == cluster.expected_hits(agents[1])
    cluster.wait_idle()


def computed_in_part(cluster: EngineCluster, prompt: list[int], salt: str) -> Completion:
    """Return a request after a chunk of its prompt was sent."""
    before = cluster.total("pe_to_de_bytes")
    request = Completion(cluster.url, prompt, FEW, salt)
    until(lambda: cluster.total("pe_to_de_bytes") > before, "a computed chunk")
    return request


def lose_rank(cluster: EngineCluster, name: str, rank: int) -> None:
    """Kill one rank; the engine logs it, ends, and the router loses it."""
    process = local(cluster.supervisor.process(name))
    os.kill(_rank(process.pid, rank), signal.SIGKILL)
    assert process.wait(GUARD_S) is not None
    until(lambda: name not in cluster.alive(), "the engine is lost")
    assert "died unexpectedly" in process.output()


def _rank(group: int, rank: int) -> int:
    """Return the process of one rank among those of an engine."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and os.getpgid(int(folder.name)) == group:
            title = (folder / "cmdline").read_text()
            if f"Worker_TP{rank}" in title:
                return int(folder.name)
    raise AssertionError(f"no rank {rank} in process group {group}")


def test_ranks_that_hold_the_same_latent_kv_send_it_in_turn(
    agents: list[list[Round]], tmp_path: Path
) -> None:
    """MLA: a prefill engine of two ranks, each with the whole KV of every token."""
    model, rounds = make_tiny_model("deepseek_v2"), agents[0][:3]
    settings = tiny_cluster_settings(
        model,
        tmp_path / "storage",
        block_tokens=16,
        compute_quota_s=0.0,
        vllm_args=LATENT_ARGS,
    )
    plain = PlainEngine(model, tmp_path, 16, *LATENT_ARGS)
    with EngineCluster(settings, tmp_path) as cluster:
        names = [
            cluster.start_engine(Role.PREFILL, 0, prefill_tp=2),
            cluster.start_engine(Role.DECODE, 0),
        ]
        with plain:
            expected = play_plain(plain.url, rounds)
        cluster.wait_for(*names)
        for salt in ("one", "another"):
            answers = cluster.replay(rounds, salt)
            assert [a.token_ids for a in answers] == expected
            assert [a.cached_tokens for a in answers] == cluster.expected_hits(rounds)
        assert cluster.ask_without_hits(rounds, expected) == (expected[-1], 0)
        cluster.wait_idle()
        assert cluster.total("transfer_failures") == cluster.total("persist_dropped_blocks") == 0
