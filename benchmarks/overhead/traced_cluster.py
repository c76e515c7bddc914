"""A light router, an emulated prefill and an emulated decode engine, which write traces.

All are processes of this machine; transfers use its loopback network, storage is a folder without
a bandwidth limit, and no KV stays in DRAM from one prompt to the next.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.overhead.servers import BLOCK_TOKENS, wait_ready

from dualpath.core.cluster import Role
from dualpath.core.modes import Mode
from dualpath.laboratory.models.tiny import VOCABULARY_TOKENS
from dualpath.ops.launch.cluster_keys import LOOPBACK_DEVICES
from dualpath.ops.launch.ports import claim_port
from dualpath.ops.launch.process import SpawnedProcess, Supervisor

LAYER_BUFFERS = 2
#: Enough for 24 prompts of a few thousand tokens; all of it is touched at start.
_MEMORY_BYTES = 1 << 29


def trace_path(role: Role, folder: Path) -> Path:
    """Return the path to which the engine of a role writes its trace when it ends."""
    return folder / f"{role.value}.json"


@contextmanager
def traced_cluster(
    mode: Mode, folder: Path, costs: str, engine_arguments: Sequence[str] = ()
) -> Iterator[str]:
    """Run the cluster and yield its endpoint; ``costs`` is the text of a model file."""
    model = folder / "costs.toml"
    model.write_text(costs)
    port, control_port = claim_port(), claim_port()
    router = ["emulate", "router", "--port", str(port), "--control-port", str(control_port)]
    engine = [
        "--router", f"tcp://127.0.0.1:{control_port}", "--model", str(model),
        "--storage", str(folder / "storage"), "--block-tokens", str(BLOCK_TOKENS),
        "--vocab-size", str(VOCABULARY_TOKENS), "--mode", mode.value, "--verify", "sampled",
        "--hbm-bytes", str(_MEMORY_BYTES), "--buffer-bytes", str(_MEMORY_BYTES),
        "--layer-buffers", str(LAYER_BUFFERS), "--touch-memory", *engine_arguments,
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with Supervisor() as servers:
        words = [*router, "--mode", mode.value, "--no-dram-tier"]
        servers.add(_process("router", words, folder), ends_last=True)
        for role in Role:
            words = ["emulate", role.value, "--engine-id", role.value, *engine]
            words += ["--trace-out", str(trace_path(role, folder))]
            servers.add(_process(role.value, words, folder))
        wait_ready(url, servers)
        yield url


def _process(name: str, words: Sequence[str], folder: Path) -> SpawnedProcess:
    argv = (sys.executable, "-m", "dualpath.cli.main", *words)
    return SpawnedProcess(name, argv, folder / f"{name}.log", {**os.environ, **LOOPBACK_DEVICES})
