"""Data-parallel groups of real engines that share experts: right tokens, hits, a joint failure.

vLLM's CPU build does not support this; ``cpu_experts`` patches it in these tests' workers.
"""

import contextlib
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.e2e.engine_cluster import EngineCluster, tiny_cluster_settings
from tests.e2e.plain_engine import (
    START_S,
    Completion,
    PlainEngine,
    Round,
    in_parallel,
    play_plain,
    until,
)
from tests.e2e.test_engines_rollouts import by_router
from tests.guard import GUARD_S

from dualpath.core.cluster import Role
from dualpath.launch.ports import claim_port
from dualpath.launch.settings import LocalClusterSettings
from dualpath_lab.models.random_models import make_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

MENDED = ("--worker-extension-cls", "tests.e2e.cpu_experts.MendedCpuExperts")
#: Ranks compute in lock step, on a few cores 0.2 s a token: prompts and answers are short.
GENERATE = 10


def an_agent(seed: int) -> list[Round]:
    """Two turns of random tokens, the second with hits."""
    chance = random.Random(seed)
    lengths = (chance.randrange(150, 330), chance.randrange(60, 100))
    return [Round([chance.randrange(3, 500) for _ in range(n)], GENERATE) for n in lengths]


AGENTS = [an_agent(seed) for seed in range(4)]


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> list[list[list[int]]]:
    """Answers of one plain engine with all experts, by agent and turn."""
    folder = tmp_path_factory.mktemp("plain-moe")
    with PlainEngine(make_tiny_model("qwen3_moe"), folder, 64, "--no-async-scheduling") as plain:
        return in_parallel([partial(play_plain, plain.url, agent) for agent in AGENTS])


def settings_of(folder: Path, **changes: Any) -> LocalClusterSettings:
    """Engines of the model with experts; prefill holds two layers of KV."""
    model = make_tiny_model("qwen3_moe")
    changes = {"vllm_args": MENDED, "layer_buffers": 2} | changes
    return tiny_cluster_settings(model, folder / "storage", **changes)


@contextlib.contextmanager
def cluster(
    folder_of: pytest.TempPathFactory, prefill: int, decode: int, **changes: Any
) -> Iterator[EngineCluster]:
    """A prefill and a decode engine, one of them a group."""
    folder = folder_of.mktemp("groups")
    with EngineCluster(settings_of(folder, **changes), folder) as engines:
        names: list[str] = []
        for role, ranks in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            if ranks > 1:
                names += engines.start_group(role, 0, ranks)
            else:
                names.append(engines.start_engine(role, 0))
        engines.wait_for(*names)
        yield engines


def agents_are_right(engines: EngineCluster, right: list[list[list[int]]], salt: str) -> None:
    """Play all agents at once, with hits in their second turns."""
    played = in_parallel(
        [partial(engines.replay, agent, f"{salt} {n}") for n, agent in enumerate(AGENTS)]
    )
    assert [[answer.token_ids for answer in answers] for answers in played] == right
    hits = [[answer.cached_tokens for answer in answers] for answers in played]
    assert hits == [engines.expected_hits(agent) for agent in AGENTS]


def whole_prompts_are_right(engines: EngineCluster, right: list[list[list[int]]]) -> None:
    """Send a second turn with an unused salt: nothing is loaded."""
    assert engines.ask_without_hits(AGENTS[0], right[0]) == (right[0][-1], 0)


def test_a_prefill_group_answers_as_one_engine_does_and_is_one_unit_of_failure(
    right: list[list[list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    with cluster(tmp_path_factory, prefill=2, decode=1) as engines:
        # The ranks have timed their passes together, or an earlier start of both has.
        for rank in ("pe-0-dp0", "pe-0-dp1"):
            state = engines.service.registry.get(rank)
            assert state is not None
            assert state.info.rates.prefill_tokens is not None
        agents_are_right(engines, right, "before")
        whole_prompts_are_right(engines, right)
        assert {note.prefill_engine for note in engines.assignments()} == {"pe-0-dp0", "pe-0-dp1"}

        # A request is under way in lock step when one rank is killed: the other ends by itself.
        before = engines.total("pe_to_de_bytes")
        prompt = [token for agent in AGENTS for turn in agent for token in turn.append]
        request = Completion(engines.url, prompt, GENERATE, "a rank dies")
        until(lambda: engines.total("pe_to_de_bytes") > before, "a computed chunk")
        engines.forget_assignments()
        engines.kill("pe-0-dp1")
        sibling = engines.supervisor.process("pe-0-dp0")
        until(lambda: engines.alive() == {"de-0"}, "the group is lost", START_S)
        assert sibling.wait(GUARD_S) is not None
        names = engines.start_group(Role.PREFILL, 0, 2)
        engines.wait_for(*names)
        assert len(request.answer().token_ids) == GENERATE
        agents_are_right(engines, right, "after")
        engines.wait_idle()


def test_a_decode_group_answers_as_one_engine_does(
    right: list[list[list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    with cluster(tmp_path_factory, prefill=1, decode=2) as engines:
        agents_are_right(engines, right, "before")
        whole_prompts_are_right(engines, right)
        assert {note.decode_engine for note in engines.assignments()} == {"de-0-dp0", "de-0-dp1"}
        engines.wait_idle()


def test_ranks_behind_one_server_are_asked_by_their_number(
    right: list[list[list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """vLLM's internal load balancing: two engine cores behind one API server."""
    folder = tmp_path_factory.mktemp("one-server")
    ranks = ("--data-parallel-size", "2", "--enable-expert-parallel")
    with EngineCluster(settings_of(folder), folder) as engines:
        engines.start_engine(Role.PREFILL, 0, vllm_args=(*MENDED, *ranks))
        engines.start_engine(Role.DECODE, 0)
        named = {"pe-0-dp0", "pe-0-dp1", "de-0"}
        until(lambda: engines.alive() == named, "both ranks of one server", START_S)
        assert len({info.api_url for info in engines.service.registry.alive()}) == 2
        agents_are_right(engines, right, "one server")
        assert {note.prefill_engine for note in engines.assignments()} == {"pe-0-dp0", "pe-0-dp1"}
        engines.wait_idle()

        # SIGTERM drains both ranks of the server, which leave.
        engines.supervisor.process("pe-0").terminate()
        assert engines.supervisor.process("pe-0").wait(GUARD_S) is not None
        states = [engines.service.registry.get(f"pe-0-dp{rank}") for rank in range(2)]
        until(lambda: all(state is not None and state.left for state in states), "goodbyes")


def test_ranks_of_a_group_may_each_have_several_devices(
    right: list[list[list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Tensor parallelism inside data parallelism: two prefill ranks of two devices each."""
    with cluster(tmp_path_factory, prefill=2, decode=1, prefill_tp=2) as engines:
        agents_are_right(engines, right, "two by two")
        whole_prompts_are_right(engines, right)
        assert {note.prefill_engine for note in engines.assignments()} == {"pe-0-dp0", "pe-0-dp1"}
        engines.wait_idle()
        assert engines.total("transfer_failures") == 0


def test_a_group_over_servers_of_one_and_two_ranks_drains_together(
    right: list[list[list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """External load balancing at one server, hybrid at the other, as on machines of their own."""
    folder = tmp_path_factory.mktemp("servers")
    group = (
        *("--data-parallel-size", "3", "--enable-expert-parallel"),
        *("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(claim_port())),
    )
    one = ("--data-parallel-rank", "0")
    two = ("--data-parallel-start-rank", "1", "--data-parallel-size-local", "2")
    with EngineCluster(settings_of(folder), folder) as engines:
        engines.start_engine(Role.PREFILL, 0, vllm_args=(*MENDED, *group, *one))
        hybrid = (*group, *two, "--data-parallel-hybrid-lb")
        engines.start_engine(Role.PREFILL, 1, vllm_args=(*MENDED, *hybrid))
        engines.start_engine(Role.DECODE, 0)
        ranks = {"pe-0-dp0", "pe-1-dp1", "pe-1-dp2"}
        until(lambda: engines.alive() == ranks | {"de-0"}, "all ranks of both servers", START_S)
        assert len({info.api_url for info in engines.service.registry.alive()}) == 3
        agents_are_right(engines, right, "servers")
        assert {note.prefill_engine for note in engines.assignments()} == ranks

        # Both servers get SIGTERM while a request is under way: it ends, and so do they.
        before = engines.total("pe_to_de_bytes")
        first, _ = AGENTS[0]
        request = Completion(engines.url, first.append, GENERATE, "drain")
        until(lambda: engines.total("pe_to_de_bytes") > before, "a computed chunk")
        servers = [engines.supervisor.process(name) for name in ("pe-0", "pe-1")]
        for server in servers:
            server.terminate()
        assert request.answer().token_ids == right[0][0]
        for server in servers:
            assert server.wait(GUARD_S) is not None
        states = [engines.service.registry.get(rank) for rank in ranks]
        until(lambda: all(state is not None and state.left for state in states), "goodbyes")


@pytest.mark.parametrize("servers", [2, 1], ids=["a server for each rank", "one server"])
def test_the_weights_of_a_group_change_at_all_of_its_ranks(
    right: list[list[list[int]]], servers: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("weights")
    first, second = AGENTS[0]
    after = make_tiny_model("qwen3_moe", seed=1)
    with EngineCluster(settings_of(folder, rollouts=True), folder) as engines:
        if servers == 1:
            ranks = ("--data-parallel-size", "2", "--enable-expert-parallel")
            engines.start_engine(Role.PREFILL, 0, vllm_args=(*MENDED, *ranks))
        else:
            engines.start_group(Role.PREFILL, 0, 2)
        engines.start_engine(Role.DECODE, 0)
        named = {"pe-0-dp0", "pe-0-dp1", "de-0"}
        until(lambda: engines.alive() == named, "all ranks", START_S)
        assert [a.token_ids for a in engines.replay([first, second], "agent")] == right[0]
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(after)}}
        calls = [{"path": "/collective_rpc", "body": body}]
        report = by_router(engines, "update", calls=calls, label="step-1")
        assert report["state"] == "serving"
        assert engines.alive() == named
        engines.__dict__.pop("storage", None)  # It is that of the former namespace.
        answers = engines.replay([first, second], "agent")
        # vLLM reloads not all weights of experts on CPUs, so that no plain engine has the truth:
        # what is computed without any stored block has it.
        updated = [answer.token_ids for answer in answers]
        assert updated != right[0]
        alone = [engines.replay([first, second], salt) for salt in ("another", "one more")]
        assert [[answer.token_ids for answer in each] for each in alone] == [updated] * 2
        assert answers[0].cached_tokens == 0, "no block of the former weights"
        assert [a.cached_tokens for a in answers] == engines.expected_hits([first, second])
        engines.wait_idle()
