"""What router, hand-over and the ends of passes cost: ``python -m benchmarks.overhead WHAT``.

    ttft      TTFT through router, PE and hand-over against one vLLM server: real engines
    router    CPU of the router per request and per token, and its own part of TTFT: paced engines
    scheduler CPU and messages of a scheduler's process per request: stub engines
    front-ends  CPU of one front end and of two, stalls and memory of many streams: stub engines
    killed-scheduler  how long nothing is placed behind front ends: emulated engines
    streams   many streams at once: paced engines
    passes    what a PE's GPU waits for between forward passes: emulated engines, no lab
    traces    the same, from traces of emulated engines on a lab
    stored    TTFT of a fully stored prompt beside its transfers: emulated engines, no lab

Paced engines are emulated: real control messages, transfers and HTTP, and a clock in the place of
kernels.  Figures go to stdout; see README.md beside this folder.
"""

import argparse
from pathlib import Path

from benchmarks.overhead import (
    between_passes,
    first_token,
    front_ends,
    killed_scheduler,
    many_streams,
    passes_run,
    router_alone,
    scheduler_alone,
    stored_prompt,
)
from benchmarks.overhead.round_trip import idle_round_trip_s
from benchmarks.overhead.servers import KINDS


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_subparsers(dest="what", required=True)

    ttft = what.add_parser("ttft", help="real engines against one vLLM server")
    ttft.set_defaults(measure=first_token.measure)
    _common(ttft, prompt=100, tokens=16)
    ttft.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    ttft.add_argument("--requests", type=int, default=24, help="of a stream alone; of many, 1/8")
    ttft.add_argument("--pause-s", type=float, default=0.05, help="of a lone stream")
    ttft.add_argument("--rounds", type=int, default=3)

    router = what.add_parser("router", help="CPU and latency of the router alone")
    router.set_defaults(measure=router_alone.measure)
    _common(router, prompt=100, tokens=300)
    _paced(router, prefill_ms=1.0, step_ms=10.0)
    router.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    router.add_argument("--requests", type=int, default=2, help="of a stream; alone 8 times")
    router.add_argument("--ramp-s", type=float, default=0.5, help="within which streams start")
    router.add_argument("--idle-s", type=float, default=2.0, help="to measure the idle CPU")
    router.add_argument("--plain", action="store_true", help="a vLLM server's front end as well")
    router.add_argument("--rounds", type=int, default=3)
    router.add_argument("--ids", action="store_true", help="prompts of token ids, not of words")
    router.add_argument("--max-model-len", type=int, default=4096, help="for longer prompts")
    router.add_argument(
        "--stream-interval", type=int, default=1, help="vLLM's: tokens that come as one chunk"
    )

    scheduler = what.add_parser("scheduler", help="a scheduler's process, per request")
    scheduler.set_defaults(measure=scheduler_alone.measure)
    scheduler.add_argument("--seed", type=int, default=0)
    scheduler.add_argument("--nodes", default="48P48D", help="stub engines in one process")
    scheduler.add_argument("--front-ends", type=int, default=2, help="in that process")
    scheduler.add_argument("--agents", type=int, nargs="+", default=[1, 16, 64], help="at once")
    scheduler.add_argument("--turns", type=int, default=50, help="of an agent")
    scheduler.add_argument("--warm-up", type=int, default=3, help="turns before")
    scheduler.add_argument("--prompt", type=int, default=32_768, help="tokens of a first turn")
    scheduler.add_argument("--append", type=int, default=429, help="tokens more in each turn")
    scheduler.add_argument("--hit-share", type=float, default=0.987, help="of blocks, stored")
    scheduler.add_argument("--idle-s", type=float, default=3.0, help="to measure the idle CPU")

    linked = what.add_parser("front-ends", help="one front end and two before one scheduler")
    linked.set_defaults(measure=front_ends.measure)
    _common(linked, prompt=100, tokens=300)
    _paced(linked, prefill_ms=1.0, step_ms=50.0)
    linked.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    linked.add_argument("--front-ends", type=int, nargs="+", default=[1, 2], help="how many")
    linked.add_argument("--nodes", default="48P48D", help="stub engines in one process")
    linked.add_argument("--streams", type=int, default=64, help="of all front ends together")
    linked.add_argument("--requests", type=int, default=2, help="of a stream")
    linked.add_argument("--ramp-s", type=float, default=2.0, help="within which streams start")
    linked.add_argument("--settle-s", type=float, default=0.5, help="counted after the last token")
    linked.add_argument("--probe", action="store_true", help="stalls and memory; costs CPU itself")
    linked.add_argument("--ids", action="store_true", help="prompts of token ids, not of words")
    linked.add_argument("--max-model-len", type=int, default=4096, help="for longer prompts")
    linked.add_argument("--stream-interval", type=int, default=1, help="tokens of a chunk")

    killed = what.add_parser("killed-scheduler", help="a lost scheduler behind front ends")
    killed.set_defaults(measure=killed_scheduler.measure)
    killed.add_argument("--seed", type=int, default=0)
    killed.add_argument("--kills", type=int, default=10)
    killed.add_argument("--front-ends", type=int, default=2)
    killed.add_argument("--nodes", default="2P2D", help="emulated engines")
    killed.add_argument("--agents", type=int, default=24, help="at once")
    killed.add_argument(
        "--life-s", type=float, default=61.0,
        help="of each scheduler; one that lived for less than a minute waits before its next start",
    )  # fmt: skip

    streams = what.add_parser("streams", help="many streams at once")
    streams.set_defaults(measure=many_streams.measure_streams)
    _common(streams, prompt=50, tokens=160)
    _paced(streams, prefill_ms=1.0, step_ms=250.0)
    streams.add_argument("--streams", type=int, default=1000)
    streams.add_argument(
        "--fronts", nargs="+", choices=many_streams.FRONTS, default=many_streams.FRONTS,
        help="`dualpath router`, the light router of `dualpath emulate router`",
    )  # fmt: skip
    streams.add_argument("--ramp-s", type=float, default=20.0, help="within which streams start")

    passes = what.add_parser("passes", help="what a PE's GPU waits for between two passes")
    passes.set_defaults(measure=passes_run.measure_passes)
    passes.add_argument("--seed", type=int, default=0)
    passes.add_argument("--prompts", type=int, default=24, help="at once")
    passes.add_argument("--prompt", type=int, default=2048, help="tokens stored before")
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
    stored.add_argument("--pause-s", type=float, default=0.3, help="between them")
    stored.add_argument("--mode", choices=("dualpath", "split"), default="dualpath")
    stored.add_argument("--layer-buffers", type=int, default=2, help="layers of KV in HBM")
    stored.add_argument("--directory", type=Path, help="for the storage; default: a temporary one")

    args = parser.parse_args()
    print(" ".join(f"{k}={v}" for k, v in vars(args).items() if k != "measure"), flush=True)
    if args.what != "traces":  # those were measured elsewhere
        print(f"one byte between two idle processes and back: {idle_round_trip_s() * 1e3:.2f} ms")
    args.measure(args)


def _common(parser: argparse.ArgumentParser, *, prompt: int, tokens: int) -> None:
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompt", type=int, default=prompt, help="words, or tokens")
    parser.add_argument("--tokens", type=int, default=tokens, help="of an answer")


def _paced(parser: argparse.ArgumentParser, *, prefill_ms: float, step_ms: float) -> None:
    parser.add_argument("--prefill-ms", type=float, default=prefill_ms, help="a PE's pass")
    parser.add_argument("--step-ms", type=float, default=step_ms, help="a DE's step")


if __name__ == "__main__":
    main()
