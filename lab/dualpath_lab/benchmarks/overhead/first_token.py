"""TTFT of a 1P1D cluster against one vLLM server, both with real engines."""

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from dualpath_lab.benchmarks.overhead.client import Load, Response
from dualpath_lab.benchmarks.overhead.servers import (
    FrontEndOptions,
    Phase,
    Server,
    median,
    plain_server,
    print_table,
    real_cluster,
    run_phase,
)
from dualpath_lab.models.random_models import make_tiny_model

_STAGE = "dualpath:stage_seconds"
_TTFT = "dualpath:time_to_first_token_seconds"
_ENGINE_QUEUE = "vllm:request_queue_time_seconds"
_ENGINE_PREFILL = "vllm:request_prefill_time_seconds"
_WARM_UP = Load(streams=8, requests=2, prompt=100, tokens=8)


class Case(NamedTuple):
    """A server and a number of streams."""

    server: str
    streams: int


Rounds = dict[Case, list[Phase]]


def measure(args: argparse.Namespace) -> None:
    """Measure and print the tables."""
    model = make_tiny_model("qwen2")
    found: Rounds = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = [
            stack.enter_context(plain_server(model, Path(folder), FrontEndOptions())),
            stack.enter_context(real_cluster(model, Path(folder))),
        ]
        for server in servers:
            run_phase(server, _WARM_UP, "warm-up")
        for number in range(args.rounds):
            for streams in args.streams:
                for server in servers:
                    phase = run_phase(
                        server, _load(args, streams), f"{args.seed}/{number}/{streams}"
                    )
                    if number:  # The first round warms up.
                        found[Case(server.name, streams)].append(phase)
    names = [server.name for server in servers]
    _print_client_times(found, args.streams, names)
    _print_breakdown(found, args.streams, servers)


def _load(args: argparse.Namespace, streams: int) -> Load:
    alone = streams == 1
    return Load(
        streams=streams,
        requests=args.requests if alone else max(args.requests // 8, 1),
        prompt=args.prompt,
        tokens=args.tokens,
        spread=0.5,
        pause_s=args.pause_s if alone else 0.0,
        ramp_s=0.0 if alone else args.pause_s,
    )


def _print_client_times(found: Rounds, streams: Sequence[int], names: Sequence[str]) -> None:
    rows = []
    for count in streams:
        direct = _median(found[Case(names[0], count)], lambda p: p.quantile_s(_ttft, 0.5))
        for name in names:
            rounds = found[Case(name, count)]
            p50 = _median(rounds, lambda p: p.quantile_s(_ttft, 0.5))
            rows.append([
                str(count),
                name,
                _ms(p50),
                _ms(p50 - direct) if name != names[0] else "",
                _ms(_median(rounds, lambda p: p.quantile_s(_ttft, 0.99))),
                _ms(_median(rounds, lambda p: p.quantile_s(lambda a: a.ttst_s, 0.5))),
                _ms(_median(rounds, lambda p: p.all_cpu_s / len(p.responses))),
                _ms(_median(rounds, lambda p: p.router_cpu_s / len(p.responses))),
            ])  # fmt: skip
    prompt = found[Case(names[0], streams[0])][0].responses[0].prompt_tokens
    print_table(
        f"Prompts of about {prompt} tokens; ms, medians over rounds",
        ["streams", "server", "TTFT p50", "added", "TTFT p99", "TTST p50",
         "CPU per request, all processes", "of its front end"],
        rows,
    )  # fmt: skip


def _print_breakdown(found: Rounds, streams: Sequence[int], servers: Sequence[Server]) -> None:
    parts: dict[str, Callable[[Phase], float]] = {
        "front end, HTTP to the client": _front_end_s,
        "router: look-up at the DE": lambda p: p.mean_s("router", _STAGE, "lookup"),
        "router: scheduler": lambda p: p.mean_s("router", _STAGE, "queue"),
        "router: slots in the DE's buffer": lambda p: p.mean_s("router", _STAGE, "buffer_wait"),
        "router: message to the PE, other": _router_rest_s,
        "HTTP call to the PE": _call_s,
        "engine: queue": lambda p: p.mean_s("engine", _ENGINE_QUEUE),
        "engine: prefill": lambda p: p.mean_s("engine", _ENGINE_PREFILL),
        "**TTFT, mean**": Phase.mean_ttft_s,
        "of it, waits for KV transfers": lambda p: p.mean_s("router", _STAGE, "transfer"),
    }
    cases = [(server, count) for count in streams for server in servers]
    rows = []
    for name, part in parts.items():
        row = [name]
        for server, count in cases:
            has_router = "router" in server.metric_urls
            known = has_router or name.startswith(("front", "engine", "**"))
            rounds = found[Case(server.name, count)]
            row.append(_ms(_median(rounds, part)) if known else "")
        rows.append(row)
    head = [f"{server.name}, {count} streams" for server, count in cases]
    print_table("TTFT by part; means in ms, medians over rounds", ["part", *head], rows)


def _front_end_s(phase: Phase) -> float:
    """Return the client's TTFT beyond that measured by the router, or by the engine."""
    if "router" in phase.metrics:
        return phase.mean_ttft_s() - phase.mean_s("router", _TTFT)
    return phase.mean_ttft_s() - _engine_s(phase)


def _engine_s(phase: Phase) -> float:
    return phase.mean_s("engine", _ENGINE_QUEUE) + phase.mean_s("engine", _ENGINE_PREFILL)


def _call_s(phase: Phase) -> float:
    return phase.mean_s("router", _STAGE, "prefill") - _engine_s(phase)


def _router_rest_s(phase: Phase) -> float:
    stages = ("lookup", "queue", "buffer_wait", "prefill")
    known_s = sum(phase.mean_s("router", _STAGE, stage) for stage in stages)
    return phase.mean_s("router", _TTFT) - known_s


def _ttft(response: Response) -> float:
    return response.ttft_s


def _median(rounds: Sequence[Phase], of: Callable[[Phase], float]) -> float:
    return median([of(phase) for phase in rounds])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
