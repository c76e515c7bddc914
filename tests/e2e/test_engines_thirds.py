"""Real engines of which a third decode engine serves a part of the hits: 1P3D, mode `split`.

Requests that are sent to a decode engine directly get the answers of a plain engine, with which the
cluster's are compared.  What third engines cache is loaded in the same way; in-process emulated
engines compare it.
"""

import threading
from collections.abc import Iterator
from functools import partial

import pytest

pytest.importorskip("vllm")

from tests.e2e.engine_cluster import EngineCluster, tiny_cluster_settings
from tests.e2e.plain_engine import Answer, Round, in_parallel, tiny_model
from tests.guard import GUARD_S

from dualpath.core.cluster import Role
from dualpath.core.modes import Mode

pytestmark = [pytest.mark.engine, pytest.mark.long]

DECODE = 3
#: Some blocks of 64 tokens, so that each storage NIC has one to read.
AGENT = [
    Round([5 + (7 + index * index) % 480 for index in range(330)], 8),
    Round([9 + 11 * index % 480 for index in range(40)], 8),
    Round([3 + 7 * index % 480 for index in range(20)], 8),
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCluster]:
    folder = tmp_path_factory.mktemp("thirds")
    settings = tiny_cluster_settings(
        tiny_model(), folder / "storage", mode=Mode.SPLIT, third_engine_reads=2
    )
    with EngineCluster(settings, folder) as cluster:
        names = [cluster.start_engine(Role.PREFILL, 0)]
        names += [cluster.start_engine(Role.DECODE, index) for index in range(DECODE)]
        cluster.wait_for(*names)
        yield cluster


def thirds(engines: EngineCluster) -> set[str]:
    """The third engines of all requests since ``forget_assignments``."""
    return {run.third for made in engines.assignments() for run in made.reads if run.third}


def test_turns_of_which_third_engines_read_a_part(engines: EngineCluster) -> None:
    truth = engines.play_alone(AGENT)
    engines.forget_assignments()
    answers = engines.replay(AGENT, "turns")
    assert [answer.token_ids for answer in answers] == truth
    assert [answer.cached_tokens for answer in answers] == engines.expected_hits(AGENT)
    assert len(thirds(engines)) >= 2
    engines.wait_idle()
    for counter in ("transfer_failures", "stale_transfers", "verify_failures"):
        assert engines.total(counter) == 0, counter
    for name in thirds(engines):
        assert engines.total("storage_read_bytes", name) > 0


def test_requests_at_once_with_third_engines(engines: EngineCluster) -> None:
    prompts = [[11 + (seed * 41 + 3 * i) % 480 for i in range(330)] for seed in range(4)]
    truth = [engines.ask_alone(prompt, 8) for prompt in prompts]
    for n, prompt in enumerate(prompts):
        engines.ask(prompt, 1, f"crowd {n}")
        engines.wait_stored(prompt, f"crowd {n}")
    engines.forget_assignments()
    answers = in_parallel(
        [partial(engines.ask, prompt, 8, f"crowd {n}") for n, prompt in enumerate(prompts)]
    )
    assert [answer.token_ids for answer in answers] == truth
    assert thirds(engines)
    engines.wait_idle()
    assert engines.total("transfer_failures") == 0


def test_a_third_engine_that_is_killed_while_it_serves(engines: EngineCluster) -> None:
    """Whatever it was doing, the answers are right, and the next process serves again."""
    prompts = [[13 + (seed * 43 + 5 * i) % 480 for i in range(330)] for seed in range(4)]
    truth = [engines.ask_alone(prompt, 8) for prompt in prompts]
    for n, prompt in enumerate(prompts):
        engines.ask(prompt, 1, f"killed {n}")
        engines.wait_stored(prompt, f"killed {n}")
    answers: dict[int, Answer] = {}

    def ask(number: int) -> None:
        answers[number] = engines.ask(prompts[number], 8, f"killed {number}")

    asking = [threading.Thread(target=ask, args=(n,), daemon=True) for n in range(len(prompts))]
    for one in asking:
        one.start()
    engines.kill("de-2")
    for one in asking:
        one.join(GUARD_S)
    assert [answers[n].token_ids for n in range(len(prompts))] == truth
    engines.restart("de-2")
    again = engines.ask(prompts[0], 8, "killed 0")
    assert again.token_ids == truth[0]
    engines.wait_idle()
