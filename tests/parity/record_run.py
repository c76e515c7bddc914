"""Records the event logs of ``tests/parity/recorded`` on real vLLM engines.

    python -m tests.parity.record_run dualpath split round-robin
    python -m tests.parity.record_run dualpath --lose-engine
    python -m tests.parity.record_run dualpath --dram-tier

Six engines of a tiny model, two groups per role, replay agents that overtax them: storage reads
are throttled, HBM of a DE holds about three requests, and α and β are low, so that every category
and reason occurs.  Every hit is read from storage, but with ``--dram-tier``: then turns find in the
buffers of DEs and PEs what there was room for.
"""

import argparse
import asyncio
import json
import lzma
import random
import tempfile
from pathlib import Path
from typing import Any

from tests.guard import GUARD_S
from tests.parity.short_names import shortened

from dualpath.core.cluster import Role
from dualpath.core.modes import Mode
from dualpath.core.request import Round, Trajectory
from dualpath.launch.commands import VLLM, engine_id
from dualpath.launch.local_cluster import LocalCluster
from dualpath.launch.settings import LocalClusterSettings
from dualpath.policy.event_log import encode_line
from dualpath.router.scheduler.event_recorder import read_event_log
from dualpath.workload.conversation.sessions import Session
from dualpath.workload.conversation.token_session import TokenSession
from dualpath.workload.replay.client import ReplayOptions, replay
from dualpath.workload.replay.progress import NoProgress, ProgressState
from dualpath_lab.models.random_models import make_tiny_model

FOLDER = Path(__file__).parent / "recorded"

#: Engine → (node, group).  Engines of a node share its reading queue.
PLACES = {
    "pe-0": ("node-a", "prefill-a"),
    "pe-1": ("node-a", "prefill-a"),
    "pe-2": ("node-b", "prefill-b"),
    "de-0": ("node-c", "decode-a"),
    "de-1": ("node-c", "decode-a"),
    "de-2": ("node-d", "decode-b"),
}
CONTEXT_TOKENS = 6144
AGENTS = 10
TURNS = 8
BUFFER_BYTES = 128 << 20
#: Of an engine that caches KV for next turns: some three prompts of mean length, so that not all is
#: cached, and cached blocks are not always complete.
KEEPING_BUFFER_BYTES = 64 << 20


def grouped_engine(
    settings: LocalClusterSettings, role: Role, index: int, *ports: int, **more: Any
) -> list[str]:
    """The command of an engine on its node and in its group of ``PLACES``."""
    command = VLLM.engine(settings, role, index, *ports, **more)
    position = command.index("--kv-transfer-config") + 1
    transfer = json.loads(command[position])
    node, group = PLACES[engine_id(role, index)]
    transfer["kv_connector_extra_config"] |= {"node": node, "group": group}
    return [*command[:position], json.dumps(transfer), *command[position + 1 :]]


def sessions(seed: int) -> list[Session]:
    """Agents with long first prompts and short answers, some of them much longer than others."""
    numbers = random.Random(seed)
    return [
        TokenSession(
            Trajectory(
                f"agent-{agent}",
                (
                    Round(numbers.randint(300, 1500), numbers.randint(8, 40)),
                    *(
                        Round(numbers.randint(30, 700), numbers.randint(8, 60))
                        for _ in range(TURNS - 1)
                    ),
                ),
            )
        )
        for agent in range(AGENTS)
    ]


class LoseEngine:
    """Progress of a replay that kills a DE in the middle, as an out-of-memory killer would."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._killed = False

    def update(self, state: ProgressState) -> None:
        """Kill it once, and start the next process of that name."""
        if self._killed or state.turns_done < AGENTS * TURNS // 3:
            return
        self._killed = True
        process = self._cluster.process("de-1")
        process.kill()
        process.wait(GUARD_S)
        self._cluster.start_engines(Role.DECODE, 1)


def log_name(mode: Mode, lose_engine: bool, dram_tier: bool) -> str:
    """Return what the log of such a run is called."""
    return f"{mode}{'-engine-lost' if lose_engine else ''}{'-cached' if dram_tier else ''}"


def record(mode: Mode, seed: int, lose_engine: bool, dram_tier: bool) -> None:
    """Run one mode and keep its log, with short names, as ``<log_name>.jsonl.xz``."""
    with tempfile.TemporaryDirectory(prefix="dualpath-parity-") as folder:
        raw = Path(folder) / "events.jsonl"
        settings = LocalClusterSettings(
            model=str(make_tiny_model("qwen2")),
            storage=f"{folder}/storage",
            log_dir=f"{folder}/logs",
            nodes="3P3D",
            mode=mode,
            port=0,
            dtype="float32",
            max_model_len=CONTEXT_TOKENS,
            hbm_bytes=64 << 20,
            buffer_bytes=KEEPING_BUFFER_BYTES if dram_tier else BUFFER_BYTES,
            dram_tier=dram_tier,
            snic_bytes_per_s=8e6,
            alpha_tokens=1500,
            beta_tokens=3000,
            compute_quota_s=0.3,
            quota_flops_per_s=1e9,
            served_model_names=("tiny",),
            event_log=str(raw),
        )
        options = ReplayOptions(seed=seed, max_context_tokens=CONTEXT_TOKENS)
        commands = VLLM._replace(engine=grouped_engine)
        with LocalCluster(settings, print, commands=commands) as cluster:
            progress = LoseEngine(cluster) if lose_engine else NoProgress()
            result = asyncio.run(
                replay(sessions(seed), cluster.endpoint, options, progress=progress)
            )
        print(mode, result.summary)
        log = shortened(read_event_log(raw))
    lines = b"".join(encode_line(line) for line in (log.begin, *log.entries))
    target = FOLDER / f"{log_name(mode, lose_engine, dram_tier)}.jsonl.xz"
    target.write_bytes(lzma.compress(lines, preset=9 | lzma.PRESET_EXTREME))
    print(f"{target}: {len(log.entries)} events, {target.stat().st_size} bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modes", nargs="+", choices=[mode.value for mode in Mode])
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--lose-engine", action="store_true", help="kill a DE in the middle")
    parser.add_argument("--dram-tier", action="store_true", help="keep KV for next turns")
    chosen = parser.parse_args()
    for name in chosen.modes:
        record(Mode(name), chosen.seed, chosen.lose_engine, chosen.dram_tier)
