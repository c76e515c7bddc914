"""Phases of `gpu-check` with clusters and pairs of processes that answer as the test decides."""

import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.unit.workload_server import VOCABULARY, FakeServer, served

from dualpath.core.errors import EngineLostError
from dualpath.core.modes import Mode
from dualpath.report.files import as_json
from dualpath_lab.gpu import cluster as gpu_cluster
from dualpath_lab.gpu import jct, nixl, pair, phase
from dualpath_lab.gpu.answers import PlainAnswer
from dualpath_lab.gpu.cluster import Served
from dualpath_lab.gpu.model import prompts
from dualpath_lab.gpu.page import write_page
from dualpath_lab.gpu.results import Check, PhaseResult, read_result, write_result
from dualpath_lab.gpu.settings import GpuCheckSettings

SETTINGS = GpuCheckSettings(rehearse=True).for_rehearsal()


class Cluster:
    """Answers a prompt with its last tokens; ``wrong`` prompts differ from the second token on."""

    start_s = 1.0
    logs = Path("no-logs")

    def __init__(self, wrong: Sequence[int] = (), lost: Sequence[int] = ()) -> None:
        self._wrong, self._lost = wrong, lost
        self._seen: set[int] = set()
        self.loads = 0

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing runs."""

    @asynccontextmanager
    async def client(self) -> AsyncIterator["Cluster"]:
        yield self

    async def complete(self, prompt: list[int], count: int) -> Served:
        size = len(prompt)
        if size in self._lost:
            raise EngineLostError("the engine is gone")
        self.loads += count == 1
        tokens = prompt[-count:]
        if size in self._wrong:
            tokens = [tokens[0], *(token + 1 for token in tokens[1:])]
        cached = size if size in self._seen else 0
        self._seen.add(size)
        return Served(tokens, 0.5, 0.01 if count > 8 else 0.0, cached)


def run_pair(
    out: Path, monkeypatch: pytest.MonkeyPatch, cluster: Cluster, *, with_plain: bool = True
) -> Check:
    count = SETTINGS.sizes.answer_tokens
    if with_plain:
        answers = {
            name: PlainAnswer(len(p), 0.25, p[-count:], p[-count:], [2.5] * count)
            for name, p in prompts(SETTINGS).items()
        }
        tokens = msgspec.to_builtins(answers)
        write_result(out, PhaseResult(phase="plain", state="ok", found={"tokens": tokens}))
    monkeypatch.setattr(pair, "Cluster", lambda check, name: cluster)
    monkeypatch.setattr(pair, "_STORED_S", 0.0)
    check = Check("pair", SETTINGS, out)
    pair.pair(check)
    return check


def test_each_prompt_is_answered_cold_from_storage_and_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = run_pair(tmp_path, monkeypatch, Cluster()).found["answers"]
    assert [(row["prompt"], row["turn"], row["cached_tokens"]) for row in rows] == [
        ("130", "cold", 0), ("130", "stored", 130), ("130+", "continued", 0),
        ("700", "cold", 0), ("700", "stored", 700), ("700+", "continued", 0),
    ]  # fmt: skip
    assert all(row["equal_tokens"] == row["of"] for row in rows)
    assert rows[0]["plain_ttft_s"] == 0.25


def test_an_answer_that_parts_from_the_plain_engines_has_the_gap_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match=r"answers to 700 cold, 700 stored part .* KV is wrong"):
        run_pair(tmp_path, monkeypatch, Cluster(wrong=[700]))
    result = read_result(tmp_path, "pair")
    assert result is not None
    rows = result.found["answers"]
    parted = [row for row in rows if row["gap_where_they_part"] is not None]
    assert {row["prompt"] for row in parted} == {"700"}
    assert {(row["equal_tokens"], row["gap_where_they_part"]) for row in parted} == {(1, 2.5)}


def test_decoding_is_timed_alone_and_beside_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = run_pair(tmp_path, monkeypatch, Cluster()).found["decode"]
    assert [(row["beside"], row["median_tpot_ms"]) for row in rows] == [
        ("nothing", 10.0), ("loads", 10.0),
    ]  # fmt: skip


def test_a_failed_request_is_a_row_and_the_others_are_still_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(RuntimeError, match="1 of 6 requests failed: the engine is gone"):
        run_pair(out, monkeypatch, Cluster(lost=[194]), with_plain=False)


def test_modes_that_fail_are_rows_and_the_others_are_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replay(check: Check, mode: Mode, agents: Path) -> Any:
        assert len(agents.read_text().splitlines()) == SETTINGS.sizes.agents
        if mode is Mode.SPLIT:
            raise EngineLostError("no start")
        summary = SimpleNamespace(
            jct_s=3.0, turns=4, turns_failed=0, ttft_s=None, tpot_s=None, hit_tokens=9, hit_rate=0.5
        )
        return SimpleNamespace(summary=summary)

    monkeypatch.setattr(jct, "_replay", replay)
    check = Check("jct", SETTINGS, tmp_path)
    with pytest.raises(RuntimeError, match="no result of split"):
        jct.jct(check)
    assert [(row["mode"], row.get("jct_s")) for row in check.found["modes"]] == [
        ("basic", 3.0), ("split", None), ("oracle", 3.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("printed", "code", "problem"),
    [
        ('@{"to": "DRAM", "right": true}', 0, ""),
        ('@{"to": "DRAM", "right": false}', 0, "wrong bytes"),
        ('@{"to": "DRAM", "right": true}\nBus error', 135, "exit code 135; Bus error"),
        ("", 0, "no output"),
    ],
)
def test_wrong_bytes_and_ended_pairs_are_problems(
    printed: str, code: int, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: Sequence[str], *, stdout: Any, **rest: object) -> SimpleNamespace:
        stdout.write(printed)
        stdout.flush()
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(subprocess, "run", run)
    check = Check("nixl", SETTINGS, tmp_path)
    if problem:
        with pytest.raises(RuntimeError, match=problem):
            nixl.nixl(check)
    else:
        nixl.nixl(check)
    assert [row["UCX"] for row in check.found["transfers"]] == ["default", "TCP"] * bool(printed)


# ------------------------------------------------------------------------------- the whole flow


class PlainEngine:
    """A plain vLLM that answers as ``FakeServer``; every other token is far less likely."""

    def __init__(self, **arguments: object) -> None:
        config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=True))
        self.llm_engine = SimpleNamespace(vllm_config=config)

    def reset_prefix_cache(self) -> None:
        """Nothing is cached."""

    def generate(
        self, prompt: dict[str, list[int]], sampling: Any, use_tqdm: bool
    ) -> list[SimpleNamespace]:
        first = sum(prompt["prompt_token_ids"])
        tokens = [(first + step) % VOCABULARY for step in range(sampling.max_tokens)]
        step = {1: SimpleNamespace(logprob=0.0), 2: SimpleNamespace(logprob=-5.0)}
        answer = SimpleNamespace(token_ids=tokens, logprobs=[step] * len(tokens))
        return [SimpleNamespace(outputs=[answer])]


def test_plain_pair_and_jct_run_one_after_another_and_fill_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engines are a program that prints an endpoint and a server that caches whole prompts."""
    vllm = SimpleNamespace(LLM=PlainEngine, SamplingParams=SimpleNamespace, TokensPrompt=dict)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr("dualpath_lab.gpu.plain.model_of", lambda settings: "model")
    monkeypatch.setattr(pair, "_STORED_S", 0.0)
    (tmp_path / phase.SETTINGS_FILE).write_bytes(as_json(SETTINGS))
    with served(FakeServer()) as endpoint:
        program = f"import signal; print('endpoint {endpoint}/v1', flush=True); signal.pause()"
        command = [sys.executable, "-c", program]
        monkeypatch.setattr(gpu_cluster, "serve_command", lambda *arguments: command)
        for name in ("plain", "pair", "jct"):
            phase.run(name, tmp_path)
    found = read_result(tmp_path, "pair")
    assert found is not None
    rows = [(row["turn"], row["equal_tokens"], row["of"]) for row in found.found["answers"]]
    tokens = SETTINGS.sizes.answer_tokens
    *before, last = rows
    assert before == [(turn, tokens, tokens) for turn in ("cold", "stored", "continued")] * 2
    assert last == ("after its answer", tokens, tokens)
    cached = [row["cached_tokens"] for row in found.found["answers"]]
    assert cached[0] == 0 < cached[1] <= cached[2]
    assert cached[-1] > SETTINGS.sizes.prompt_tokens[0]  # blocks of the answer, too
    replayed = read_result(tmp_path, "jct")
    assert replayed is not None
    modes = [(row["mode"], row["turns_failed"]) for row in replayed.found["modes"]]
    assert modes == [("basic", 0), ("split", 0), ("oracle", 0)]
    page = write_page(tmp_path).read_text()
    for part in ("## plain", "### answers", "stored", "continued", "## jct", "oracle"):
        assert part in page
