"""vLLM's own benchmark client, unchanged, against an emulated cluster of processes."""

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.guard import GUARD_S

from dualpath.launch.process import SpawnedProcess
from dualpath_lab.emulated.words import write_tokenizer

pytest.importorskip("vllm")

#: `vllm bench serve`; the `vllm` command does not work in the CPU build.
BENCH = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
#: Generous, because importing vLLM takes a busy machine a minute.
BENCH_S = 8 * GUARD_S
PROMPTS, PREFIX_TOKENS, SUFFIX_TOKENS, ANSWER_TOKENS = 12, 256, 40, 6


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    """Run `dualpath emulate cluster` during a test; the URL of its router."""
    command = (
        *(sys.executable, "-m", "dualpath.cli.main", "emulate", "cluster", "--nodes", "2P2D"),
        *("--model", "qwen2.5-32b", "--storage", str(tmp_path / "kv"), "--transport", "memory"),
        *("--layers", "2", "--kv-bytes-per-token", "32", "--speedup", "20"),
        *("--buffer-bytes", "8MiB", "--hbm-bytes", "8MiB"),
    )
    cluster = SpawnedProcess("cluster", command, tmp_path / "cluster.log")
    try:
        line = cluster.wait_for_line("endpoint", 4 * GUARD_S)
        yield line.split()[2].removesuffix("/v1")
    finally:
        cluster.send_signal(signal.SIGINT)
        cluster.end(GUARD_S)


def counters(endpoint: str) -> dict[str, int]:
    """Return the router's totals."""
    status = f"{endpoint}/dualpath/v1/status"
    with urllib.request.urlopen(status, timeout=GUARD_S) as response:
        totals: dict[str, int] = json.load(response)["counters"]
    return totals


@pytest.mark.parametrize(
    ("backend", "path", "added_tokens"),
    # A chat adds the tokens of `<|user|>` and `<|assistant|>` to a prompt.
    [
        pytest.param("vllm", "/v1/completions", 0, marks=pytest.mark.long),
        ("openai-chat", "/v1/chat/completions", 7),
    ],
)
def test_vllm_bench_gets_the_sizes_that_it_asks_for(
    endpoint: str, tmp_path: Path, backend: str, path: str, added_tokens: int
) -> None:
    words = tmp_path / "words"
    words.mkdir()
    write_tokenizer(words)
    arguments = (
        *("--backend", backend, "--endpoint", path, "--base-url", endpoint),
        *("--model", "emulated", "--tokenizer", str(words), "--num-prompts", str(PROMPTS)),
        *("--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "2"),
        *("--prefix-repetition-prefix-len", str(PREFIX_TOKENS)),
        *("--prefix-repetition-suffix-len", str(SUFFIX_TOKENS)),
        *("--prefix-repetition-output-len", str(ANSWER_TOKENS), "--max-concurrency", "1"),
        *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"),
    )
    subprocess.run(
        [sys.executable, "-c", BENCH, *arguments], check=True, timeout=BENCH_S, cwd=tmp_path
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (PROMPTS, 0)
    prompt_tokens = PREFIX_TOKENS + SUFFIX_TOKENS + added_tokens
    assert result["total_input_tokens"] == PROMPTS * prompt_tokens
    assert result["total_output_tokens"] == PROMPTS * ANSWER_TOKENS
    counted = counters(endpoint)
    assert counted["prompt_tokens"] >= PROMPTS * prompt_tokens
    # A prefix is in some engine's DRAM or in storage from its second prompt on.
    assert counted["hit_tokens"] > 0
