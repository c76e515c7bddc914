"""How much later agents are done behind other proxies than behind a front end of dualpath.

    DUALPATH_OTHER_PROXIES=FOLDER PYTHONPATH=.:lab python -m tests.e2e.other_proxies_cost OUT.json

The same `vllm serve` engines serve all of them, on CPUs with a tiny model, whose steps take
milliseconds: the share that a proxy costs is larger than with a model whose turns take seconds.
Agents play their turns at once; a turn's context is what the agent has sent and got.  Each proxy
plays in turn, several times, with agents of its own.  JCT is the time until an agent has its last
answer (the mean of all agents).
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from tests.e2e.other_proxies import PROXIES, command, running
from tests.e2e.plain_engine import MAX_MODEL_LEN, NAME, complete, in_parallel, tiny_model, until
from tests.e2e.two_leg_cluster import BLOCK_TOKENS, Served, served_engines
from tests.guard import GUARD_S

from dualpath.launch.ports import claim_port
from dualpath.launch.process import SpawnedProcess, Supervisor

OURS = "dualpath frontend"
COMPARED = ("vllm-example", "vllm-router", "vllm-router-mooncake", "production-stack")
AGENTS, TURNS, APPENDED, GENERATED = 3, 5, 200, 32
REPEATS = 5


@contextmanager
def front_end(served: Served, log: Path) -> Iterator[str]:
    """Run a front end of dualpath before the engines; yields its URL."""
    port = claim_port()
    arguments = (
        *("frontend", str(tiny_model()), "--scheduler", served.front_ends, "--port", str(port)),
        *("--served-model-names", NAME, "--max-model-len", str(MAX_MODEL_LEN)),
        *("--block-tokens", str(BLOCK_TOKENS), "--dtype", "float32"),
    )
    with Supervisor() as started:
        process = SpawnedProcess(
            "frontend", (sys.executable, "-m", "dualpath.cli.main", *arguments), log
        )
        started.add(process)
        url = f"http://127.0.0.1:{port}"

        def serves() -> bool:
            assert process.alive, process.log_tail()
            try:
                return bool(complete(url, [1, 2, 3], 1).token_ids)
            except (OSError, AssertionError):
                return False

        until(serves, "a front end serves", GUARD_S)
        yield url


def play_agent(url: str, seed: int) -> float:
    """Play an agent; return its JCT in seconds."""
    began_s = time.perf_counter()
    context: list[int] = []
    for turn in range(TURNS):
        context += [
            3 + (seed * 7919 + turn * 271 + index * index) % 337 for index in range(APPENDED)
        ]
        context += complete(url, context, GENERATED).token_ids
    return time.perf_counter() - began_s


def jct_s(url: str, seed: int) -> float:
    """Return the mean JCT of agents that play at once."""
    agents = [partial(play_agent, url, seed * AGENTS + number) for number in range(AGENTS)]
    times: list[float] = in_parallel(agents)
    return statistics.mean(times)


def measure(served: Served, decode: Sequence[str], folder: Path) -> dict[str, list[float]]:
    """Return the JCTs of each proxy with these decode engines, by repeat."""
    found: dict[str, list[float]] = {}
    with ExitStack() as stack:
        urls = {OURS: stack.enter_context(front_end(served, folder / "frontend.log"))}
        for proxy in (one for one in PROXIES if one.name in COMPARED):
            engines = [served.url("prefill")], [served.url(name) for name in decode]
            log = folder / f"{proxy.name}-{len(decode)}.log"
            urls[proxy.name] = stack.enter_context(running(proxy, *engines, log))
        for repeat in range(REPEATS + 1):
            for number, (name, url) in enumerate(urls.items()):
                seed = 1000 * len(decode) + repeat * len(urls) + number
                jct = jct_s(url, seed)
                if repeat:  # The first ones connect and warm up.
                    found.setdefault(name, []).append(jct)
    return found


def summary(found: dict[str, list[float]]) -> list[str]:
    """Return a line for each proxy: median JCT, and what it is more than ours."""
    ours = statistics.median(found[OURS])
    return [
        f"{name:22s} {statistics.median(times):.3f} s  {statistics.median(times) / ours - 1:+.1%}"
        for name, times in found.items()
    ]


def main() -> None:
    """Measure with one and with two decode engines, and write all JCTs."""
    for proxy in PROXIES:
        if proxy.name in COMPARED:
            command(proxy)
    results = {}
    for decode in (1, 2):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with served_engines(folder, decode) as served:
                names = [one for one in served.ports if one != "prefill"]
                results[f"1P{decode}D"] = found = measure(served, names, folder)
            print(f"1P{decode}D", *summary(found), sep="\n", flush=True)
    Path(sys.argv[1]).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
