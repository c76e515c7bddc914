"""The clients: the command of each, and how its results are checked."""

import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

# ------------------------------------------------------------------------------------ environments
# A separate virtual environment for every client, as their dependencies conflict.

#: Read only by pip; its value is passed on to uv.
_FIND_LINKS = "PIP_FIND_LINKS"


class Package(NamedTuple):
    """A client on a package index.

    ``python`` is the oldest Python on which its code runs; ``asks_for_newer``: its metadata
    requires a newer one.  ``additional`` are packages that it imports without requiring them.
    """

    name: str
    version: str
    python: tuple[int, int] = (3, 10)
    asks_for_newer: bool = False
    additional: tuple[str, ...] = ()


class NotRunnable(Exception):
    """A client that cannot be run on this machine, and why."""


def environment(package: Package, folder: Path) -> Path:
    """Return the folder with the programs of ``package``; install it on the first call.

    Raises ``NotRunnable`` without a Python that is new enough, and ``CalledProcessError`` if the
    package cannot be installed.
    """
    place = folder / package.name
    stamp = place / f".{package.version}"
    if not stamp.exists():
        _uv("venv", "--quiet", "--clear", "--python", _interpreter(package), str(place))
        _install(package, place / "bin" / "python")
        stamp.touch()
    return place / "bin"


def _interpreter(package: Package) -> str:
    if sys.version_info >= package.python:
        return sys.executable
    wanted = ".".join(map(str, package.python))
    sought = ("python", "find", "--no-python-downloads", f">={wanted}")
    found = _uv(*sought, variables=_all_of_pyenv(), check=False)
    if found.returncode:
        raise NotRunnable(f"needs Python {wanted}; `uv python install {wanted}` would install it")
    return found.stdout.strip()


def _all_of_pyenv() -> dict[str, str]:
    """Return the variable with which all `python3.N` of pyenv work; a failing one would stop uv."""
    if (pyenv := shutil.which("pyenv")) is None:
        return {}
    listed = subprocess.run([pyenv, "versions", "--bare"], check=True, capture_output=True)
    return {"PYENV_VERSION": ":".join(listed.stdout.decode().split())}


def _install(package: Package, python: Path) -> None:
    into = ("pip", "install", "--quiet", "--python", str(python))
    client = f"{package.name}=={package.version}"
    if not package.asks_for_newer:
        _uv(*into, client, *package.additional)
        return
    # Only pip can install on an older Python than required; as it would also choose dependencies
    # for the newer one, uv installs those.
    _uv(*into, "pip")
    pip = (str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-requires-python")
    subprocess.run([*pip, client], check=True)
    read = f"import importlib.metadata as m; print('\\n'.join(m.requires({package.name!r}) or []))"
    listed = subprocess.run([str(python), "-c", read], check=True, capture_output=True, text=True)
    needed = [line for line in listed.stdout.splitlines() if not re.search(r";.*\bextra\b", line)]
    _uv(*into, *needed, *package.additional)


def _uv(
    *arguments: str, variables: Mapping[str, str] | None = None, check: bool = True
) -> "subprocess.CompletedProcess[str]":
    environ = {**os.environ, **(variables or {})}
    if links := environ.get(_FIND_LINKS):
        environ.setdefault("UV_FIND_LINKS", ",".join(shlex.split(links)))
    command = [sys.executable, "-m", "uv", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done


HERE = Path(__file__).parent

#: Grammar of the agent's model: a call of the tool `bash` with one of a few commands.  Without it a
#: random model would never produce a tool call.
AGENT_GRAMMAR = (
    r'<tool_call>\n\{"name": "bash", "arguments": \{"command": '
    r'"(ls|wc -l notes\.txt|cat notes\.txt)"\}\}\n</tool_call>'
)
AGENT_STEPS = 4

WEKA_BLOCK_TOKENS = 64

#: Size of the replay `aa-mini-v1`, which is part of agentperf-local.
AGENTPERF_TURNS, AGENTPERF_TURN_TOKENS = 6, 256


class Target(NamedTuple):
    """The cluster; ``model_folder`` has the tokenizer, ``folder`` is for output."""

    url: str
    model: str
    model_folder: Path
    folder: Path


class Client(NamedTuple):
    """A client: its command in a work folder, and the check of its results there.

    ``check`` raises ``AssertionError`` for a failed request.  ``paths`` are environment variables
    with paths inside the installed packages.  ``variant`` distinguishes clients of one package.
    ``emulated``: it needs no answer that makes sense, so it runs against emulated engines too.
    """

    package: Package
    command: Callable[[Target, Path], list[str]]
    check: Callable[[Path], str]
    variables: Mapping[str, str] = {}
    paths: Mapping[str, str] = {}
    variant: str = ""
    emulated: bool = False

    @property
    def name(self) -> str:
        """The name by which it is chosen."""
        return f"{self.package.name}-{self.variant}" if self.variant else self.package.name


def _script(name: str) -> Callable[[Target, Path], list[str]]:
    return lambda target, work: ["python", str(HERE / name), target.url, target.model]


def _last_line(work: Path) -> str:
    return (work / "output.log").read_text().splitlines()[-1]


def _aiperf(target: Target, work: Path) -> list[str]:
    return [
        "aiperf", "profile", "--model", target.model, "--url", target.url,
        "--endpoint-type", "chat", "--streaming", "--tokenizer", str(target.model_folder),
        "--conversation-num", "4", "--conversation-turn-mean", "3", "--concurrency", "2",
        "--isl", "300", "--osl", "16", "--random-seed", "1", "--ui", "none",
        "--artifact-dir", str(work / "results"),
    ]  # fmt: skip


def _aiperf_results(work: Path) -> str:
    (file,) = (work / "results").rglob("profile_export_aiperf.json")
    results = json.loads(file.read_text())
    assert not results.get("error_summary"), results["error_summary"]
    requests = int(results["request_count"]["avg"])
    assert requests == 12, f"{requests} requests instead of 4 conversations of 3 turns"
    return f"{requests} requests in 4 conversations"


def _aiperf_agents(target: Target, work: Path) -> list[str]:
    traces = work / "traces"
    traces.mkdir()
    for number in range(8):
        (traces / f"{number}.json").write_text(json.dumps(_weka_trace(number, turns=6)))
    return [
        "aiperf", "profile", "--scenario", "inferencex-agentx-mvp", "--unsafe-override",
        "--model", target.model, "--url", target.url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", str(target.model_folder), "--use-server-token-count",
        "--custom-dataset-type", "weka_trace", "--input-file", str(traces), "--concurrency", "4",
        "--benchmark-duration", "30", "--extra-inputs", "ignore_eos:true", "--random-seed", "1",
        "--ui", "none", "--artifact-dir", str(work / "results"),
    ]  # fmt: skip


def _aiperf_agents_results(work: Path) -> str:
    (file,) = (work / "results").rglob("profile_export_aiperf.json")
    results = json.loads(file.read_text())
    assert not results.get("error_summary"), results["error_summary"]
    requests = int(results["request_count"]["avg"])
    assert requests > 0, "no request"
    return f"{requests} requests of agents in 30 s"


def _guidellm(target: Target, work: Path) -> list[str]:
    return [
        "guidellm", "run", "--backend", f"kind=openai_http,target={target.url}",
        "--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=12",
        "--tokenizer", f"kind=hf_auto,model={target.model_folder}",
        "--data", "kind=synthetic_text,prompt_tokens=300,output_tokens=16,turns=3",
        "--disable-console-interactive", "--output", f"kind=json,path={work / 'results.json'}",
    ]  # fmt: skip


def _guidellm_results(work: Path) -> str:
    (benchmark,) = json.loads((work / "results.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (12, 0), totals
    return "12 requests in conversations of 3 turns"


def _agentic_bench(target: Target, work: Path) -> list[str]:
    return [
        "abench", "run", "--base-url", target.url, "--model", target.model, "--tokenizer",
        str(target.model_folder), "--dataset-name", "random", "--turns", "4", "--input-increment",
        "300", "--output-len", "16", "--system-prompt-len", "512", "--max-concurrency", "4",
        "--gap-policy", "zero", "--disable-tqdm", "--output-file", str(work / "results.jsonl"),
    ]  # fmt: skip


def _agentic_bench_results(work: Path) -> str:
    output = (work / "output.log").read_text()
    assert re.search(r"turn completion rate +100\.0 %", output), output[-2000:]
    (turns,) = re.findall(r"turns total +(\d+)", output)
    return f"{turns} turns of 8 agents"


def _cache_pressure(target: Target, work: Path) -> list[str]:
    return [
        "cache-pressure", "--base-url", f"{target.url}/v1", "--model", target.model,
        "--kv-size", "20000", "--context-tokens", "4000", "--output", str(work / "results.json"),
    ]  # fmt: skip


def _cache_pressure_results(work: Path) -> str:
    output = (work / "output.log").read_text()
    (retained,) = re.findall(r"retained contexts: +(\d+/\d+)", output)
    return f"{retained} contexts hit again, judged by time"


def _inference_perf(target: Target, work: Path) -> list[str]:
    traces = work / "traces"
    traces.mkdir()
    for number in range(3):
        (traces / f"{number}.json").write_text(json.dumps(_weka_trace(number)))
    config = {
        "api": {"type": "chat", "streaming": True},
        "data": {
            "type": "weka_trace_replay",
            "weka_trace_replay": {
                "trace_directory": str(traces),
                "use_static_model": True,
                "static_model_name": target.model,
                "ignore_trace_delays": True,
                "datagen_workers": 1,
            },
        },
        "load": {
            "type": "trace_session_replay",
            "num_workers": 1,
            "stages": [{"concurrent_sessions": 2, "num_sessions": 3}],
        },
        "server": {
            "type": "vllm",
            "model_name": target.model,
            "base_url": target.url,
            "ignore_eos": True,
        },
        "tokenizer": {"pretrained_model_name_or_path": str(target.model_folder)},
        "storage": {"local_storage": {"path": str(work / "results")}},
    }
    # JSON is valid YAML.
    (work / "config.yaml").write_text(json.dumps(config, indent=1))
    return ["inference-perf", "--config_file", str(work / "config.yaml")]


def _weka_trace(number: int, turns: int = 3) -> dict[str, object]:
    """Return an agent with a prompt that grows by two blocks a turn."""
    chance = random.Random(number)
    hash_ids: list[int] = []
    requests = []
    for turn in range(turns):
        hash_ids = [*hash_ids, *(chance.randrange(1 << 30) for _ in range(2))]
        tokens = len(hash_ids) * WEKA_BLOCK_TOKENS
        requests.append(
            {"t": float(turn), "type": "n", "model": "any", "in": tokens, "out": 12,
             "hash_ids": hash_ids, "think_time": 0.0, "api_time": 0.5}
        )  # fmt: skip
    return {
        "id": f"agent-{number}",
        "models": ["any"],
        "block_size": WEKA_BLOCK_TOKENS,
        "requests": requests,
    }


def _inference_perf_results(work: Path) -> str:
    (file,) = (work / "results").rglob("summary_lifecycle_metrics.json")
    results = json.loads(file.read_text())
    succeeded, failed = results["successes"]["count"], results["failures"]["count"]
    assert (succeeded, failed) == (9, 0), f"{succeeded} requests succeeded, {failed} failed"
    return f"{succeeded} requests of 3 agents"


def _mini_swe_agent(target: Target, work: Path) -> list[str]:
    (work / "notes.txt").write_text("Two paths lead from the storage to the engines.\n")
    grammar = {"structured_outputs": {"regex": AGENT_GRAMMAR}}
    settings = [
        f"model.model_kwargs.api_base={target.url}/v1",
        "model.model_kwargs.api_key=none",
        "model.model_kwargs.temperature=1.0",
        "model.model_kwargs.max_tokens=200",
        f"model.model_kwargs.extra_body={json.dumps(grammar)}",
        f"agent.step_limit={AGENT_STEPS}",
    ]
    named = [argument for setting in settings for argument in ("-c", setting)]
    return [
        "mini", "--model", f"hosted_vllm/{target.model}", "--yolo", "--exit-immediately",
        "--task", "Count the lines of notes.txt.", "--output", str(work / "trajectory.json"),
        "-c", "mini.yaml", *named,
    ]  # fmt: skip


def _trajectory(work: Path) -> str:
    trajectory = json.loads((work / "trajectory.json").read_text())
    ended = trajectory["info"]["exit_status"]
    assert ended == "LimitsExceeded", ended
    steps = trajectory["info"]["model_stats"]["api_calls"]
    seen = [each for each in trajectory["messages"] if each["role"] == "tool"]
    ran = sum('"returncode": 0' in each["content"] for each in seen)
    assert (steps, ran) == (AGENT_STEPS, AGENT_STEPS), f"{ran} commands run in {steps} steps"
    return f"{steps} steps, each of which ran a command"


def _agentperf(target: Target, work: Path) -> list[str]:
    return [
        "agentperf-local", "run", "--base-url", f"{target.url}/v1", "--model", target.model,
        "--replay", "aa-mini-v1", "--tool-choice", "none", "--output-dir", str(work / "results"),
    ]  # fmt: skip


def _agentperf_results(work: Path) -> str:
    summary = json.loads((work / "results" / "summary.json").read_text())
    turns = [json.loads(line) for line in (work / "results" / "turns.jsonl").open()]
    assert summary["success"], summary["failed_turn_ids"]
    generated = [turn["tokens"]["server_output_tokens"] for turn in turns]
    assert generated == [AGENTPERF_TURN_TOKENS] * AGENTPERF_TURNS, generated
    return f"{len(turns)} turns of {AGENTPERF_TURN_TOKENS} tokens"


#: Otherwise LiteLLM downloads prices at every start.
_OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}

CLIENTS = (
    Client(Package("openai", "3.52.0"), _script("openai_chat.py"), _last_line),
    Client(Package("anthropic", "2.12.0"), _script("anthropic_chat.py"), _last_line),
    Client(Package("openai-agents", "0.24.0"), _script("agents_sdk.py"), _last_line),
    Client(Package("litellm", "1.106.2"), _script("litellm_chat.py"), _last_line, _OFFLINE),
    Client(Package("aiperf", "0.13.0"), _aiperf, _aiperf_results, emulated=True),
    Client(
        Package("aiperf", "0.13.0"),
        _aiperf_agents,
        _aiperf_agents_results,
        variant="agents",
        emulated=True,
    ),
    Client(Package("guidellm", "0.8.1"), _guidellm, _guidellm_results, emulated=True),
    Client(
        Package("agentic-bench", "0.2.0"), _agentic_bench, _agentic_bench_results, emulated=True
    ),
    Client(
        Package("cache-pressure", "0.6.3"), _cache_pressure, _cache_pressure_results, emulated=True
    ),
    Client(
        Package("inference-perf", "0.7.0", asks_for_newer=True),
        _inference_perf,
        _inference_perf_results,
        emulated=True,
    ),
    Client(
        Package("mini-swe-agent", "2.4.6", additional=("litellm==1.106.2", "mcp")),
        _mini_swe_agent,
        _trajectory,
        {**_OFFLINE, "MSWEA_CONFIGURED": "1", "MSWEA_COST_TRACKING": "ignore_errors"},
    ),
    Client(
        # It counts tokens with a table that tiktoken would download, and that LiteLLM contains.
        Package("agentperf-local", "0.3.4", python=(3, 12), additional=("litellm==1.106.2",)),
        _agentperf,
        _agentperf_results,
        paths={"TIKTOKEN_CACHE_DIR": "litellm/litellm_core_utils/tokenizers"},
        emulated=True,
    ),
)
