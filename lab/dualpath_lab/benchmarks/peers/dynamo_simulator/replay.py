"""Replays a converted trace in Dynamo's simulator and prints one line of JSON.

Run with the interpreter of the directory that ``set_up.sh`` made:
``DIRECTORY/bin/python replay.py TRACE --workers 48`` (aggregated, a delta trace) or
``… --prefill-workers 16 --decode-workers 32`` (disaggregated, a cumulative trace).

CPU-seconds are those of the replay only, without imports; the time to read the trace is measured by
a replay that ends at virtual time zero and subtracted.  Dynamo runs with its KV router, prefix
caches that hold every session, and without logging.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Dynamo reads it at import; at the default level it logs every request.
os.environ["DYN_LOG"] = "off"

from dynamo.mocker import MockEngineArgs
from dynamo.replay import run_trace_replay

ENGINE = {
    "block_size": 64,
    "num_gpu_blocks": 1_000_000,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
}
END_AT_ONCE_MS = 1e-3


def engine(**role: bool) -> MockEngineArgs:
    """Return the settings of a worker."""
    return MockEngineArgs.from_json(json.dumps(ENGINE | role))


def deployment(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of an aggregated or a disaggregated replay."""
    if arguments.workers:
        return {
            "extra_engine_args": engine(),
            "num_workers": arguments.workers,
            "trace_format": "mooncake-delta",
            "trace_block_size": 64,
        }
    return {
        "prefill_engine_args": engine(is_prefill=True),
        "decode_engine_args": engine(is_decode=True),
        "num_prefill_workers": arguments.prefill_workers,
        "num_decode_workers": arguments.decode_workers,
        "trace_format": "mooncake",
        "trace_block_size": 512,
    }


def timed(call: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], float]:
    """Return the report and its CPU-seconds."""
    started = time.process_time()
    report = call()
    return report, time.process_time() - started


def peak_memory_bytes() -> int:
    """Return the peak memory of this process; ``ru_maxrss`` may be its parent's."""
    status = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--prefill-workers", type=int, default=0)
    parser.add_argument("--decode-workers", type=int, default=0)
    arguments = parser.parse_args()
    disaggregated = arguments.prefill_workers and arguments.decode_workers
    if bool(arguments.workers) == bool(disaggregated):
        parser.error("give either --workers or both --prefill-workers and --decode-workers")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    setting = deployment(arguments) | {"router_mode": "kv_router"}
    path = str(arguments.trace)
    _, read_s = timed(lambda: run_trace_replay(path, max_sim_time_ms=END_AT_ONCE_MS, **setting))
    report, cpu_s = timed(lambda: run_trace_replay(path, **setting))
    found = {
        "turns": report["completed_requests"],
        "cpu_s": cpu_s - read_s,
        "read_cpu_s": read_s,
        "peak_bytes": peak_memory_bytes(),
        "jct_s": report["duration_ms"] / 1000,
        "hit_rate": report["prefix_cache_reused_ratio"],
        "generated_tokens": report["total_output_tokens"],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
