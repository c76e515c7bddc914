"""Overhead of the router, of PD transfers and of pass ends: ``python -m benchmarks.overhead WHAT``.

    ttft      TTFT of a 1P1D cluster against one vLLM server: real engines
    router    CPU of the router per request and per token, and its share of TTFT: paced engines
    scheduler CPU and messages of a scheduler process per request: stub engines
    front-ends  CPU of one and of two front ends, latency and memory of many streams: stub engines
    killed-scheduler  time without placements after a scheduler's crash: emulated engines
    streams   many concurrent streams: paced engines
    passes    idle time of a PE's GPU between forward passes: emulated engines, no lab
    traces    the same, from traces of emulated engines on a lab
    stored    TTFT of a fully stored prompt compared with its transfers: emulated engines, no lab

Paced engines are emulated engines with fixed computation times: real control messages, transfers
and HTTP, and timers instead of kernels.  Results are printed; see README.md in the parent folder.
"""

import argparse
import multiprocessing
import socket
import statistics
import time
from pathlib import Path

from dualpath_lab.benchmarks.overhead import (
    between_passes,
    first_token,
    front_ends,
    killed_scheduler,
    router_cost,
    scheduler_cost,
    stored_prompt,
)
from dualpath_lab.benchmarks.overhead import between_passes as passes_run
from dualpath_lab.benchmarks.overhead.servers import KINDS

# -------------------------------------------------------------------------------------- round trip
# Time to wake an idle process on this machine: a lower bound of every message's latency.

_TRIPS = 200
#: Long enough for both processes to sleep.
_PAUSE_S = 0.01


def idle_round_trip_s() -> float:
    """Return the median round-trip time of one byte over loopback TCP between idle processes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        echo = multiprocessing.get_context("fork").Process(target=_echo, args=(listener,))
        echo.start()
        with socket.create_connection(listener.getsockname()) as connection:
            times_s = [_trip_s(connection) for _ in range(_TRIPS)]
        echo.join()
    return statistics.median(times_s)


def _trip_s(connection: socket.socket) -> float:
    time.sleep(_PAUSE_S)
    start_s = time.perf_counter()
    connection.send(b"\0")
    connection.recv(1)
    return time.perf_counter() - start_s


def _echo(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        while received := connection.recv(1):
            connection.send(received)


def main() -> None:
    """Run the measurement that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_subparsers(dest="what", required=True)

    ttft = what.add_parser("ttft", help="real engines against one vLLM server")
    ttft.set_defaults(measure=first_token.measure)
    _common(ttft, prompt=100, tokens=16)
    ttft.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    ttft.add_argument(
        "--requests", type=int, default=24, help="requests of a single stream; 1/8 each with more"
    )
    ttft.add_argument(
        "--pause-s", type=float, default=0.05, help="between requests of a single stream"
    )
    ttft.add_argument("--rounds", type=int, default=3)

    router = what.add_parser("router", help="CPU and latency of the router itself")
    router.set_defaults(measure=router_cost.measure)
    _common(router, prompt=100, tokens=300)
    _paced(router, prefill_ms=1.0, step_ms=10.0)
    router.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    router.add_argument(
        "--requests", type=int, default=2, help="requests per stream; 8 times as many for one"
    )
    router.add_argument("--ramp-s", type=float, default=0.5, help="period in which streams start")
    router.add_argument(
        "--idle-s", type=float, default=2.0, help="duration of the idle CPU measurement"
    )
    router.add_argument("--plain", action="store_true", help="also measure a plain vLLM server")
    router.add_argument("--rounds", type=int, default=3)
    router.add_argument("--ids", action="store_true", help="prompts of token ids instead of text")
    router.add_argument("--max-model-len", type=int, default=4096, help="for longer prompts")
    router.add_argument(
        "--stream-interval", type=int, default=1, help="vLLM's setting: tokens per chunk"
    )

    scheduler = what.add_parser("scheduler", help="a scheduler process, per request")
    scheduler.set_defaults(measure=scheduler_cost.measure)
    scheduler.add_argument("--seed", type=int, default=0)
    scheduler.add_argument("--nodes", default="48P48D", help="stub engines in one process")
    scheduler.add_argument("--front-ends", type=int, default=2, help="front ends in that process")
    scheduler.add_argument("--agents", type=int, nargs="+", default=[1, 16, 64], help="concurrent")
    scheduler.add_argument("--turns", type=int, default=50, help="turns per agent")
    scheduler.add_argument("--warm-up", type=int, default=3, help="turns before the measurement")
    scheduler.add_argument("--prompt", type=int, default=32_768, help="tokens of the first turn")
    scheduler.add_argument("--append", type=int, default=429, help="new tokens per turn")
    scheduler.add_argument("--hit-share", type=float, default=0.987, help="share of stored blocks")
    scheduler.add_argument(
        "--idle-s", type=float, default=3.0, help="duration of the idle CPU measurement"
    )

    linked = what.add_parser("front-ends", help="one and two front ends of one scheduler")
    linked.set_defaults(measure=front_ends.measure)
    _common(linked, prompt=100, tokens=300)
    _paced(linked, prefill_ms=1.0, step_ms=50.0)
    linked.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    linked.add_argument(
        "--front-ends", type=int, nargs="+", default=[1, 2], help="numbers of front ends"
    )
    linked.add_argument("--nodes", default="48P48D", help="stub engines in one process")
    linked.add_argument(
        "--streams", type=int, default=64, help="streams of all front ends together"
    )
    linked.add_argument("--requests", type=int, default=2, help="requests per stream")
    linked.add_argument("--ramp-s", type=float, default=2.0, help="period in which streams start")
    linked.add_argument(
        "--settle-s", type=float, default=0.5, help="time measured after the last token"
    )
    linked.add_argument(
        "--probe", action="store_true", help="measure latency and memory; costs CPU"
    )
    linked.add_argument("--ids", action="store_true", help="prompts of token ids instead of text")
    linked.add_argument("--max-model-len", type=int, default=4096, help="for longer prompts")
    linked.add_argument("--stream-interval", type=int, default=1, help="tokens per chunk")

    killed = what.add_parser("killed-scheduler", help="crash of a scheduler with front ends")
    killed.set_defaults(measure=killed_scheduler.measure)
    killed.add_argument("--seed", type=int, default=0)
    killed.add_argument("--kills", type=int, default=10)
    killed.add_argument("--front-ends", type=int, default=2)
    killed.add_argument("--nodes", default="2P2D", help="emulated engines")
    killed.add_argument("--agents", type=int, default=24, help="concurrent")
    killed.add_argument(
        "--life-s", type=float, default=61.0,
        help="run time of each scheduler; after less than a minute, restarts are delayed",
    )  # fmt: skip

    streams = what.add_parser("streams", help="many concurrent streams")
    streams.set_defaults(measure=router_cost.measure_streams)
    _common(streams, prompt=50, tokens=160)
    _paced(streams, prefill_ms=1.0, step_ms=250.0)
    streams.add_argument("--streams", type=int, default=1000)
    streams.add_argument(
        "--fronts", nargs="+", choices=router_cost.FRONTS, default=router_cost.FRONTS,
        help="router: `dualpath router`; light: `dualpath emulate router`",
    )  # fmt: skip
    streams.add_argument("--ramp-s", type=float, default=20.0, help="period in which streams start")

    passes = what.add_parser("passes", help="idle time of a PE's GPU between two passes")
    passes.set_defaults(measure=passes_run.measure_passes)
    passes.add_argument("--seed", type=int, default=0)
    passes.add_argument("--prompts", type=int, default=24, help="concurrent")
    passes.add_argument("--prompt", type=int, default=2048, help="stored tokens")
    passes.add_argument("--append", type=int, default=512, help="new tokens in each round")
    passes.add_argument("--rounds", type=int, default=3)

    traces = what.add_parser("traces", help="the same, from traces of PEs on a lab")
    traces.set_defaults(measure=between_passes.measure)
    traces.add_argument("traces", type=Path, nargs="+", metavar="TRACE.json")
    traces.add_argument("--layer-buffers", type=int, default=2, help="layers of KV in HBM")

    stored = what.add_parser("stored", help="TTFT of a fully stored prompt")
    stored.set_defaults(measure=stored_prompt.measure)
    stored.add_argument("--seed", type=int, default=0)
    stored.add_argument("--prompts", type=int, nargs="+", default=[2048, 8192, 32768])
    stored.add_argument("--requests", type=int, default=30)
    stored.add_argument("--pause-s", type=float, default=0.3, help="between requests")
    stored.add_argument("--mode", choices=("dualpath", "split"), default="dualpath")
    stored.add_argument("--layer-buffers", type=int, default=2, help="layers of KV in HBM")
    stored.add_argument(
        "--directory", type=Path, help="folder of the storage; default: a temporary one"
    )

    args = parser.parse_args()
    print(" ".join(f"{k}={v}" for k, v in vars(args).items() if k != "measure"), flush=True)
    if args.what != "traces":  # recorded elsewhere
        print(
            f"round trip of one byte between two idle processes: {idle_round_trip_s() * 1e3:.2f} ms"
        )
    args.measure(args)


def _common(parser: argparse.ArgumentParser, *, prompt: int, tokens: int) -> None:
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompt", type=int, default=prompt, help="words, or tokens")
    parser.add_argument("--tokens", type=int, default=tokens, help="generated tokens")


def _paced(parser: argparse.ArgumentParser, *, prefill_ms: float, step_ms: float) -> None:
    parser.add_argument(
        "--prefill-ms", type=float, default=prefill_ms, help="duration of a PE's pass"
    )
    parser.add_argument("--step-ms", type=float, default=step_ms, help="duration of a DE's step")


if __name__ == "__main__":
    main()
