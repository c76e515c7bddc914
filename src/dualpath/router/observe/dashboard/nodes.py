"""Nodes and steps as the page draws them: sums over engines, rates over the window."""

from collections.abc import Iterable, Sequence
from typing import Any

from dualpath.core.cluster import Role
from dualpath.router.control.engine_state import EngineState
from dualpath.router.observe.dashboard.engine_window import EngineWindow
from dualpath.router.observe.engine_metrics import MOVEMENTS

#: Counters that make up an engine's traffic with other engines.  Transfers are counted at the PE,
#: which starts them.  Each byte that a DE copies to its HBM was either read into its buffer and
#: sent to the PE (Fig. 4b, 3-5) or received from it (5-7 and new KV), so there its copies stand for
#: them; blocks that later chunks of a prompt load again (``chunk.reload``) are missing.
CNIC_COUNTERS = {
    Role.PREFILL: ("pe_to_de_bytes", "de_to_pe_bytes"),
    Role.DECODE: ("h2d_bytes",),
}


def steps(engines: Sequence[EngineState], window: EngineWindow) -> list[dict[str, Any]]:
    """Return bytes per second of each row of Fig. 4, over all engines."""
    rows = []
    for row in MOVEMENTS:
        moved = sum(
            window.moved(engine.info.engine_id, row.counter)
            for engine in engines
            if engine.info.role is row.role
        )
        rows.append(
            {
                "step": row.step,
                "path": row.path,
                "link": row.link,
                "bytes_per_s": moved / window.span_s if window.span_s else 0.0,
            }
        )
    return rows


def nodes(engines: Iterable[EngineState], window: EngineWindow) -> list[dict[str, Any]]:
    """Return one object per node and role, by first arrival; engines that left are not in it."""
    groups: dict[tuple[Role, str], list[EngineState]] = {}
    for engine in engines:
        if not engine.left:
            groups.setdefault((engine.info.role, engine.info.node), []).append(engine)
    return [_node(role, name, found, window) for (role, name), found in groups.items()]


def _node(
    role: Role, name: str, engines: Sequence[EngineState], window: EngineWindow
) -> dict[str, Any]:
    up = [engine for engine in engines if engine.alive]

    def rate(*counters: str) -> float:
        moved = sum(window.moved(e.info.engine_id, name) for e in up for name in counters)
        return moved / window.span_s if window.span_s else 0.0

    def reported(field: str) -> int:
        return sum(getattr(e.report, field) for e in up if e.report is not None)

    buffer_tokens, hbm_tokens = _capacity(up, "buffer_tokens"), _capacity(up, "hbm_tokens")
    return {
        "node": name,
        "role": role.value,
        "engines": len(engines),
        "engines_up": len(up),
        "snic_read_bytes_per_s": rate("storage_read_bytes"),
        "snic_write_bytes_per_s": rate("storage_write_bytes"),
        "snic_limit_bytes_per_s": _snic_limit(up),
        "cnic_bytes_per_s": rate(*CNIC_COUNTERS[role]),
        "read_queue_tokens": reported("read_queue_tokens"),
        "buffer_tokens": buffer_tokens,
        "buffer_used_tokens": max(buffer_tokens - reported("free_buffer_tokens"), 0),
        "hbm_tokens": hbm_tokens,
        "hbm_used_tokens": max(hbm_tokens - reported("free_hbm_tokens"), 0),
        "unfinished_requests": reported("unfinished_requests"),
        "unfinished_tokens": reported("unfinished_tokens"),
    }


def _capacity(up: Iterable[EngineState], field: str) -> int:
    """Sum over engines that have reported: of the others it is not known what is free."""
    return sum(getattr(engine.info, field) for engine in up if engine.report is not None)


def _snic_limit(up: Sequence[EngineState]) -> float | None:
    """Return what a node's engines may read, bytes/s; None unless all of them state it."""
    limits = [engine.info.snic_bytes_per_s for engine in up]
    stated = [limit for limit in limits if limit]
    return sum(stated) if stated and len(stated) == len(limits) else None
