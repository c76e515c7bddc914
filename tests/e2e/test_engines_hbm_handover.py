"""A real decode engine with little HBM, which receives prompts in a share of it, mode `auto`.

1P1D.  Requests that are sent to the decode engine directly get the answers of a plain engine, with
which the cluster's are compared.  The failures of such engines are those of `test_engines`.
"""

import re
import urllib.request
from collections.abc import Iterator
from functools import partial

import pytest

pytest.importorskip("vllm")

from tests.e2e.engine_cluster import EngineCluster, tiny_cluster_settings
from tests.e2e.plain_engine import Round, in_parallel, tiny_model, until
from tests.guard import GUARD_S

from dualpath.core.cluster import Role
from dualpath.core.modes import Handover

pytestmark = [pytest.mark.engine, pytest.mark.long]

MAX_MODEL_LEN = 512
#: 9 of 20 blocks of 64 tokens receive prompts, 10 are left for decoding.
HBM_BYTES, RECEIVE_SHARE = 20 << 19, 0.45
AGENT = [
    Round([5 + (7 + index * index) % 480 for index in range(200)], 12),
    Round([9 + 11 * index % 480 for index in range(60)], 12),
    Round([3 + 7 * index % 480 for index in range(20)], 10),
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCluster]:
    folder = tmp_path_factory.mktemp("receiving")
    settings = tiny_cluster_settings(
        tiny_model(),
        folder / "storage",
        max_model_len=MAX_MODEL_LEN,
        handover=Handover.AUTO,
        receive_hbm_share=RECEIVE_SHARE,
    )
    with EngineCluster(settings, folder) as cluster:
        names = [
            cluster.start_engine(Role.PREFILL, 0),
            cluster.start_engine(Role.DECODE, 0, hbm_bytes=HBM_BYTES, decode_prefix_caching=True),
        ]
        cluster.wait_for(*names)
        yield cluster


def preemptions(engines: EngineCluster) -> float:
    with urllib.request.urlopen(f"{engines.decode_url}/metrics", timeout=GUARD_S) as response:
        text = response.read().decode()
    return sum(map(float, re.findall(r"^vllm:num_preemptions_total\S* (\S+)", text, re.M)))


def all_hbm_is_free(engines: EngineCluster) -> bool:
    state = engines.service.registry.get("de-0")
    assert state is not None
    report = state.report
    return report is not None and report.load.free_hbm_tokens == state.info.hbm_tokens


def test_turns_of_which_hbm_caches_the_beginning(engines: EngineCluster) -> None:
    """Blocks that vLLM finds in its prefix cache stay; the others change places."""
    truth = engines.play_alone(AGENT)
    answers = engines.replay(AGENT, "turns")
    assert [answer.token_ids for answer in answers] == truth
    assert [answer.cached_tokens for answer in answers] == engines.expected_hits(AGENT)
    engines.wait_idle()
    assert {note.handover for note in engines.assignments()} == {Handover.HBM}
    for counter in ("transfer_failures", "persist_dropped_blocks", "stale_transfers"):
        assert engines.total(counter) == 0, counter
    until(partial(all_hbm_is_free, engines), "free HBM")


def test_requests_that_are_preempted_are_computed_again(engines: EngineCluster) -> None:
    """Two requests generate more than is reserved for them, so that one has to make room."""
    prompts = [[17 + (seed * 37 + index * index) % 480 for index in range(60)] for seed in (1, 2)]
    truth = [engines.ask_alone(prompt, 400) for prompt in prompts]
    before = preemptions(engines)
    answers = in_parallel(
        [partial(engines.ask, prompt, 400, f"long {n}") for n, prompt in enumerate(prompts)]
    )
    assert preemptions(engines) > before
    assert [answer.token_ids for answer in answers] == truth
    engines.wait_idle()
    until(partial(all_hbm_is_free, engines), "free HBM")


def test_prompts_that_wait_for_the_receiving_share_get_their_turn(engines: EngineCluster) -> None:
    """Each takes four of the nine blocks; six come at once."""
    prompts = [[11 + (seed * 41 + 3 * i) % 480 for i in range(200)] for seed in range(6)]
    truth = [engines.ask_alone(prompt, 20) for prompt in prompts]
    answers = in_parallel(
        [partial(engines.ask, prompt, 20, f"crowd {n}") for n, prompt in enumerate(prompts)]
    )
    assert [answer.token_ids for answer in answers] == truth
    engines.wait_idle()
    assert engines.total("transfer_failures") == 0
    until(partial(all_hbm_is_free, engines), "free HBM")
