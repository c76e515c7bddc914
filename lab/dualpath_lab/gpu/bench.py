"""Phase `bench`: streamed prefill compared with computing alone, and copies; needs no vLLM.

The measurements are those of ``dualpath_lab.benchmarks.gpu``, which the wheel of the lab does not
contain: this phase runs in a checkout of the repository.
"""

import importlib
from collections.abc import Callable
from typing import Any

from dualpath_lab.gpu.results import Check

_BENCHMARKS = "dualpath_lab.benchmarks.gpu"
_BUFFERS = (1, 2, 3)
_WARM_UP, _REPEATS = 2, 5
#: Layers of the measured stack: enough that the first load and the last send are a small part.
_LAYERS = 8
#: Hit tokens, appended tokens, pieces of a copy and bytes of a piece.
_CACHED, _APPENDED = (4096, 16384, 32768), (256, 1024, 4096)
_PIECES, _PIECE_BYTES = (16, 256, 1024), (41984, 262144)
_TINY_CACHED, _TINY_APPENDED, _TINY_PIECES, _TINY_PIECE_BYTES = (8, 24), (4,), (7,), (64,)


def bench(check: Check) -> None:
    """Measure copies first, which take the shorter time."""
    import torch

    device = torch.device(check.device)
    if device.type == "cuda":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    machine = importlib.import_module(f"{_BENCHMARKS}.machine")
    check.put("rehearsal", check.settings.rehearse)
    check.put("machine", [{k: str(v) for k, v in machine.environment(device).items()}])
    _copies(check, device, machine.open_machine)
    _prefill(check, device, machine.open_machine)


def _copies(check: Check, device: Any, open_machine: Callable[[Any], Any]) -> None:  # noqa: ANN401
    copies = importlib.import_module(f"{_BENCHMARKS}.copies")
    tiny = check.settings.rehearse
    rows: list[dict[str, object]] = []
    for piece_bytes in _TINY_PIECE_BYTES if tiny else _PIECE_BYTES:
        for pieces in _TINY_PIECES if tiny else _PIECES:
            for direction in ("h2d", "d2h"):
                case = copies.CopyCase(
                    direction=direction,
                    pieces=pieces,
                    piece_bytes=piece_bytes,
                    full_block_layers=3 if tiny else 16,
                    seed=0,
                )
                opened = open_machine(device)
                try:
                    found = copies.measure_copies(case, opened, device, _WARM_UP, _REPEATS)
                finally:
                    opened.close()
                rows += [
                    {
                        "direction": direction,
                        "pieces": pieces,
                        "piece_bytes": piece_bytes,
                        "method": way,
                        "GB_per_s": pieces * piece_bytes / row["median_s"] / 1e9,
                        "cpu_us_per_piece": row["post_s"] * 1e6 / pieces,
                        "right": row["right"],
                    }
                    for way, row in found["ways"].items()
                ]
                check.put("copies", rows)


def _prefill(check: Check, device: Any, open_machine: Callable[[Any], Any]) -> None:  # noqa: ANN401
    prefill = importlib.import_module(f"{_BENCHMARKS}.prefill")
    geometry = importlib.import_module(f"{_BENCHMARKS}.geometry")
    tiny = check.settings.rehearse
    rows: list[dict[str, object]] = []
    for cached in _TINY_CACHED if tiny else _CACHED:
        for append in _TINY_APPENDED if tiny else _APPENDED:
            stack = geometry.TINY_GQA if tiny else geometry.QWEN
            case = prefill.PrefillCase(
                geometry=stack,
                layers=min(_LAYERS, stack.layers),
                cached=cached,
                append=append,
                feed_forward=True,
                dtype="bfloat16" if device.type == "cuda" else "float32",
                seed=0,
            )
            opened = open_machine(device)
            try:
                found = prefill.measure_prefill(case, _BUFFERS, opened, device, _WARM_UP, _REPEATS)
            finally:
                opened.close()
            alone_s = found["times"]["alone"]["median_s"]
            rows.append(
                {
                    "model": found["model"],
                    "hit_tokens": cached,
                    "appended_tokens": append,
                    "loaded_GB": found["loaded_bytes"] / 1e9,
                    "alone_ms": alone_s * 1e3,
                    **{
                        f"{way} / alone": times["median_s"] / alone_s
                        for way, times in found["times"].items()
                        if way != "alone"
                    },
                }
            )
            check.put("prefill", rows)
