"""Phase `jct`: the same agents in several modes, with storage reads throttled so that they bind."""

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path

from dualpath.core.errors import DualPathError
from dualpath.core.modes import Mode
from dualpath.workload.replay.result import Distribution, ReplayResult, read_result
from dualpath_lab.gpu.cluster import Cluster
from dualpath_lab.gpu.model import SEED
from dualpath_lab.gpu.results import Check

#: Time limit of one replay.
_REPLAY_S = 120.0
_ANSWER_TOKENS = 16
_SHORTEST, _LONGEST = 100, 600


def jct(check: Check) -> None:
    """Replay the agents in each mode; a mode that fails is a row with its error.

    Raises ``RuntimeError`` if one has failed, after the others.
    """
    check.put("rehearsal", check.settings.rehearse)
    check.put("snic_bytes_per_s", check.settings.snic_bytes_per_s)
    agents = check.logs / "agents.jsonl"
    agents.write_text(agents_lines(check))
    rows: list[dict[str, object]] = []
    check.put("modes", rows)  # Before the logs on the page.
    for mode in check.settings.modes:
        try:
            row = _columns(_replay(check, mode, agents))
        except (DualPathError, OSError, RuntimeError, subprocess.TimeoutExpired) as error:
            row = {"error": f"{type(error).__name__}: {error}"[:600]}
        rows.append({"mode": mode.value, **row})
        check.put("modes", rows)
    if failed := [str(row["mode"]) for row in rows if row.get("error")]:
        raise RuntimeError(f"no result of {', '.join(failed)}")


def agents_lines(check: Check) -> str:
    """Return agents of a long first prompt and short turns, in the format of `dualpath replay`."""
    draw, sizes = random.Random(SEED), check.settings.sizes
    lines = []
    for agent in range(sizes.agents):
        first = int(sizes.context_tokens * draw.uniform(0.7, 1.3))
        later = [draw.randrange(_SHORTEST, _LONGEST) for _ in range(sizes.turns - 1)]
        rounds = [[append, _ANSWER_TOKENS] for append in (first, *later)]
        lines.append(json.dumps({"session_id": f"agent-{agent}", "rounds": rounds}))
    return "\n".join(lines) + "\n"


def _replay(check: Check, mode: Mode, agents: Path) -> ReplayResult:
    out = check.logs / f"{mode.value}.json"
    rate = str(check.settings.snic_bytes_per_s)
    flags = ("--mode", mode.value, "--snic-bytes-per-s", rate, "--profile", "off")
    with Cluster(check, f"jct-{mode.value}", *flags) as cluster:
        asyncio.run(_first_request(cluster))
        command = [
            *(sys.executable, "-m", "dualpath.cli.main", "replay", str(agents)),
            *("--endpoint", cluster.endpoint, "--seed", str(SEED), "--quiet"),
            *("--label", mode.value, "--json", str(out)),
        ]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_REPLAY_S)
    print(ended.stdout, ended.stderr, flush=True)
    if ended.returncode:
        raise RuntimeError(f"replay exited with code {ended.returncode}: {ended.stderr[-300:]}")
    return read_result(out)


async def _first_request(cluster: Cluster) -> None:
    async with cluster.client():
        """The client itself sends a request that compiles kernels."""


def _columns(result: ReplayResult) -> dict[str, object]:
    summary = result.summary
    return {
        "jct_s": summary.jct_s,
        "turns": summary.turns,
        "turns_failed": summary.turns_failed,
        "mean_ttft_s": _mean(summary.ttft_s),
        "mean_tpot_ms": 1e3 * _mean(summary.tpot_s),
        "hit_tokens": summary.hit_tokens,
        "hit_rate": summary.hit_rate,
    }


def _mean(values: Distribution | None) -> float:
    return values.mean if values else 0.0
