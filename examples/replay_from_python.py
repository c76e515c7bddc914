"""Replays an agent trace against a running endpoint: TRACE [ENDPOINT]."""

import asyncio
import sys

from dualpath.workload.formats import read_trace
from dualpath.workload.replay.client import ReplayOptions, replay


def main(trace: str, endpoint: str = "http://127.0.0.1:8000") -> None:
    sessions = read_trace(trace)  # text traces also need replay(…, encode=load_encoder(folder))
    result = asyncio.run(replay(sessions, endpoint, ReplayOptions(agents=4, max_turns=10)))
    summary = result.summary
    print(f"JCT {summary.jct_s:.1f} s, {summary.turns} turns, {summary.turns_failed} failed")
    if summary.ttft_s is not None:
        print(
            f"TTFT mean {summary.ttft_s.mean * 1000:.0f} ms, p99 {summary.ttft_s.p99 * 1000:.0f} ms"
        )
    if summary.hit_rate is not None:
        print(f"hit rate {summary.hit_rate:.1%} of at most {summary.ideal_hit_rate or 0:.1%}")


if __name__ == "__main__":
    main(*sys.argv[1:])
