"""A real vLLM engine changes its role under agents; their tokens stay what they were."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.e2e.engine_cluster import tiny_cluster_settings
from tests.e2e.plain_engine import START_S, complete, tiny_model

from dualpath.core.modes import Mode
from dualpath.launch.local_cluster import LocalCluster
from dualpath.router.scheduler.role_calls import call_roles

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

AGENTS, TURNS, GENERATED = 3, 3, 24


class Agent:
    """Plays one conversation again and again, each time with a new salt and so without hits."""

    def __init__(self, endpoint: str, number: int) -> None:
        self._endpoint = endpoint
        self._number = number
        self.laps: list[list[list[int]]] = []
        self.failure: Exception | None = None

    def lap(self) -> list[list[int]]:
        """Play all turns; return their answers.  Later turns hit what earlier ones stored."""
        salt, context = f"agent {self._number}, lap {len(self.laps)}", list[int]()
        answers = []
        for turn in range(TURNS):
            context += [10 + (self._number * 97 + turn * 31 + i) % 300 for i in range(150)]
            answers.append(complete(self._endpoint, context, GENERATED, salt).token_ids)
            context += answers[-1]
        self.laps.append(answers)
        return answers

    def play(self, over: threading.Event) -> None:
        """Play until it is ``over``, or fails."""
        try:
            while not over.is_set():
                self.lap()
        except Exception as error:
            self.failure = error


def roles_of(cluster: LocalCluster) -> dict[str, str]:
    """Return the roles of live engines."""
    return {e["engine_id"]: e["role"] for e in cluster.status()["engines"] if e["alive"]}


def test_a_prefill_engine_becomes_a_decode_engine_and_no_token_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = tiny_cluster_settings(
        tiny_model(), tmp_path / "kv", nodes="2P1D", mode=Mode.DUALPATH, port=0
    )
    with LocalCluster(settings) as cluster:
        agents = [Agent(cluster.endpoint, number) for number in range(AGENTS)]
        truth = [agent.lap() for agent in agents]
        over = threading.Event()
        threads = [threading.Thread(target=agent.play, args=(over,)) for agent in agents]
        for thread in threads:
            thread.start()
        try:
            # Engines end with the thread that starts them: this one supervises the switch.
            more_laps(cluster, agents)
            switch = call_roles(cluster.cluster_url, {}, {"role": "decode", "engine_id": "pe-1"})
            assert switch["engines"] == ["pe-1"]
            watched(cluster, lambda: call_roles(cluster.cluster_url, {})["switch"] is None)
            report = call_roles(cluster.cluster_url, {})
            assert roles_of(cluster) == {"pe-0": "prefill", "pe-1": "decode", "de-0": "decode"}
            more_laps(cluster, agents)
            after = cluster.status()
        finally:
            over.set()
            for thread in threads:
                thread.join()
    assert [agent.failure for agent in agents] == [None] * AGENTS
    for agent, expected in zip(agents, truth, strict=True):
        assert agent.laps == [expected] * len(agent.laps)
    assert [s["state"] for s in report["past"]] == ["joined"]
    assert (report["prefill"], report["decode"]) == (1, 2)
    # It decodes, and later turns hit what earlier ones stored.
    assert "pe-1" in {note["decode_engine"] for note in after["assignments"]}
    assert after["counters"]["hit_tokens"] > 0
    assert after["counters"]["retries"] == 0
    assert "pe-1 has exited as requested and is restarted" in caplog.messages
    print(f"switch: {report['past'][0]['took_s']:.1f} s; laps: {[len(a.laps) for a in agents]}")


def more_laps(cluster: LocalCluster, agents: Sequence[Agent]) -> None:
    """Wait until every agent has played a whole conversation that begins after now."""
    wanted = [len(agent.laps) + 2 for agent in agents]
    watched(
        cluster,
        lambda: all(
            len(a.laps) >= n or a.failure is not None for a, n in zip(agents, wanted, strict=True)
        ),
    )


def watched(cluster: LocalCluster, true: Callable[[], bool]) -> None:
    """Supervise the cluster as `dualpath serve` does, until something is true."""
    end_s = time.monotonic() + START_S
    while not true():
        assert time.monotonic() < end_s, "it takes longer than an engine's start may"
        cluster.supervise()
        time.sleep(0.05)
