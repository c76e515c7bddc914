"""The body of ``GET /dualpath/v1/dashboard``: the present state and a history of ten minutes.

Sampled once a second, also without a viewer; a sample costs O(engines + open requests).
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np

from dualpath.core.cluster import Role
from dualpath.core.errors import BadRequestError
from dualpath.core.modes import Mode
from dualpath.router.observe.engine_metrics import MOVEMENTS
from dualpath.router.observe.metrics import RouterMetrics
from dualpath.router.observe.status import ORACLE_NOTE, assignments, model_name
from dualpath.router.scheduler.dispatch import Placement
from dualpath.router.scheduler.registry import EngineState, Registry
from dualpath.router.stages import RequestRecord

#: Samples of the whole cluster, one a second.
MAX_SAMPLES = 600
#: TTFTs of this long are pooled into the figures of ``recent_ttft``, of at most so many requests.
RECENT_S = 60.0
_RECENT_REQUESTS = 4096


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """What happened in the ``interval_s`` before ``time_s`` (the router's clock).

    Tokens and bytes are those of the interval.  ``ttft_p50_s`` and ``ttft_p90_s`` are over
    the requests that streamed their first token in it, None without any.  ``waiting`` and
    ``running`` requests are counted at its end.
    """

    time_s: float
    interval_s: float
    pe_read_bytes: float
    de_read_bytes: float
    prompt_tokens: int
    hit_tokens: int
    generated_tokens: int
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    waiting: int
    running: int


class History:
    """The latest samples, numbered from 1, and the TTFTs of the last minute."""

    def __init__(self, most_samples: int = MAX_SAMPLES) -> None:
        self.last_seq = 0
        self._samples: deque[Sample] = deque(maxlen=most_samples)
        self._ttfts: deque[tuple[float, float]] = deque(maxlen=_RECENT_REQUESTS)

    def add(self, sample: Sample, ttfts_s: Iterable[float]) -> None:
        """Append a sample and the TTFTs (seconds) that were observed in its interval."""
        self.last_seq += 1
        self._samples.append(sample)
        self._ttfts.extend((sample.time_s, ttft_s) for ttft_s in ttfts_s)
        while self._ttfts and self._ttfts[0][0] <= sample.time_s - RECENT_S:
            self._ttfts.popleft()

    def since(self, seq: int) -> dict[str, Any]:
        """Return columns and the samples after number ``seq``; all of them for a number to come.

        The latter is what a page asks that has watched a router before this one.
        """
        wanted = self.last_seq - seq if 0 <= seq <= self.last_seq else len(self._samples)
        samples = list(self._samples)
        return {
            "kept": self._samples.maxlen,
            "columns": Sample.__struct_fields__,
            "rows": samples[len(samples) - min(wanted, len(samples)) :],
        }

    def recent_ttft(self) -> dict[str, Any]:
        """Return median and 90th percentile of the TTFTs of the last ``RECENT_S``."""
        p50_s, p90_s = median_and_p90([ttft_s for _, ttft_s in self._ttfts])
        return {
            "span_s": RECENT_S,
            "requests": len(self._ttfts),
            "ttft_p50_s": p50_s,
            "ttft_p90_s": p90_s,
        }


def median_and_p90(values: list[float]) -> tuple[float | None, float | None]:
    """Return both (linear interpolation), None without values."""
    if not values:
        return None, None
    p50, p90 = np.quantile(values, (0.5, 0.9))
    return float(p50), float(p90)


# ------------------------------------------------------------------------ bytes moved by engines


class _Seen:
    """What one tick saw of an engine; ``counters`` is the report's own, never changed."""

    __slots__ = ("counters", "epoch")

    def __init__(self, epoch: str, counters: dict[str, float]) -> None:
        self.epoch = epoch
        self.counters = counters


class EngineWindow:
    """The latest ``ticks`` + 1 samples of all engines' counters.

    Only differences within one process of an engine count: one that restarts, or that a restarted
    router meets with large totals, shows no leap.
    """

    def __init__(self, ticks: int) -> None:
        self._samples: deque[tuple[float, dict[str, _Seen]]] = deque(maxlen=ticks + 1)

    def tick(self, now_s: float, engines: Iterable[EngineState]) -> None:
        """Sample the engines' latest reports."""
        seen = {
            engine.info.engine_id: _Seen(engine.info.epoch, engine.report.counters)
            for engine in engines
            if engine.report is not None
        }
        self._samples.append((now_s, seen))

    @property
    def span_s(self) -> float:
        """Seconds between the oldest and the newest sample; 0 before the second one."""
        return self._samples[-1][0] - self._samples[0][0] if self._samples else 0.0

    def moved(self, engine_id: str, counter: str, *, last_tick: bool = False) -> float:
        """Return how far a counter moved within the window, or since the sample before the last."""
        if not self._samples or (newest := self._samples[-1][1].get(engine_id)) is None:
            return 0.0
        samples = list(self._samples)[-2:] if last_tick else self._samples
        for _, seen in samples:
            oldest = seen.get(engine_id)
            if oldest is not None and oldest.epoch == newest.epoch:
                moved = newest.counters.get(counter, 0) - oldest.counters.get(counter, 0)
                return max(moved, 0.0)
        return 0.0


# ------------------------------------------------------------------------ nodes and steps


#: Counters that make up an engine's traffic with other engines.  Transfers are counted at the PE,
#: which starts them.  Each byte that a DE copies to its HBM was either read into its buffer and
#: sent to the PE (Fig. 4b, 3-5) or received from it (5-7 and new KV), so there its copies stand for
#: them; blocks that later chunks of a prompt load again (``chunk.reload``) are missing.  What a DE
#: moves from another one is counted where it arrives.
CNIC_COUNTERS = {
    Role.PREFILL: ("pe_to_de_bytes", "de_to_pe_bytes"),
    Role.DECODE: ("h2d_bytes", "de_to_de_bytes"),
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
        return sum(getattr(e.report.load, field) for e in up if e.report is not None)

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


# ------------------------------------------------------------------------ the page's data


#: Incremented whenever a field changes its meaning.
SCHEMA = "dualpath.dashboard/1"
SAMPLE_S = 1.0
#: Rates are means over so many samples: engines report every 0.5 s, so single ones are ragged.
_WINDOW_SAMPLES = 5
_ASSIGNMENTS = 16
_LOST_ENGINES = 16
#: More requests than can end between two samples.
_MAX_ENDED = 16384


class Load(NamedTuple):
    """What only the service knows: open requests, how many have engines, latest decisions.

    ``draining``: an operator has asked that new requests go to other schedulers.
    ``at_scheduler`` of the waiting ones are in the scheduler's queue, the others at front ends.
    """

    open_requests: Iterable[RequestRecord]
    waiting: int
    running: int
    placements: Iterable[Placement]
    draining: bool = False
    at_scheduler: int = 0


class Dashboard:
    """Samples one router; lives in its event loop.

    ``clock`` gives seconds and is the one by which records and registry note times.
    """

    def __init__(
        self,
        registry: Registry,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        load: Callable[[], Load],
    ) -> None:
        self.history = History()
        self._run = secrets.token_hex(8)
        self._registry = registry
        self._metrics = metrics
        self._clock = clock
        self._load = load
        self._window = EngineWindow(_WINDOW_SAMPLES)
        self._ended: deque[RequestRecord] = deque(maxlen=_MAX_ENDED)
        self._ended_tokens = 0
        self._pictured: tuple[int, dict[str, Any]] = (-1, {})
        self._sampled_s = clock()
        self._sampled_tokens = (0, 0, 0)

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(SAMPLE_S)

    def ended(self, record: RequestRecord) -> None:
        """A request is over and no longer among the open ones."""
        self._ended.append(record)
        self._ended_tokens += record.generated_tokens

    def sample(self) -> None:
        """Append what happened since the last sample to the history."""
        now_s = self._clock()
        load = self._load()
        records = list(load.open_requests)
        self._window.tick(now_s, self._registry.all())
        ttfts_s = [
            record.first_token_s - record.start_s
            for record in chain(records, self._ended)
            if record.first_token_s is not None and self._sampled_s < record.first_token_s <= now_s
        ]
        self._ended.clear()
        generated = self._ended_tokens + sum(record.generated_tokens for record in records)
        tokens = (self._metrics.prompt_tokens, self._metrics.hit_tokens, generated)
        prompt, hits, new = (
            now - before for now, before in zip(tokens, self._sampled_tokens, strict=True)
        )
        p50_s, p90_s = median_and_p90(ttfts_s)
        sample = Sample(
            time_s=now_s,
            interval_s=now_s - self._sampled_s,
            pe_read_bytes=self._read_bytes(Role.PREFILL),
            de_read_bytes=self._read_bytes(Role.DECODE),
            prompt_tokens=prompt,
            hit_tokens=hits,
            generated_tokens=new,
            ttft_p50_s=p50_s,
            ttft_p90_s=p90_s,
            waiting=load.waiting,
            running=load.running,
        )
        self.history.add(sample, ttfts_s)
        self._sampled_s, self._sampled_tokens = now_s, tokens

    def report(self, since: str = "0") -> dict[str, Any]:
        """Return the body, for msgspec's JSON encoder, with the samples after number ``since``.

        Raises ``BadRequestError`` if that is no number.
        """
        seq = _sample_number(since)
        registry, load = self._registry, self._load()
        engines = registry.all()
        now_s = self._clock()
        return {
            "schema": SCHEMA,
            "run": self._run,
            "seq": self.history.last_seq,
            "now_s": now_s,
            "mode": registry.mode.value if registry.mode else None,
            "mode_note": ORACLE_NOTE if registry.mode is Mode.ORACLE else None,
            "model": model_name(registry),
            **({"draining": True} if load.draining else {}),
            "waiting": load.waiting,
            "waiting_at_scheduler": load.at_scheduler,
            "running": load.running,
            "engines": {role.value: _liveness(engines, role) for role in Role},
            "lost_engines": _lost(engines, now_s),
            **self._picture(engines),
            "recent": self.history.recent_ttft(),
            "history": self.history.since(seq),
            "assignments": assignments(
                registry, reversed(deque(load.placements, maxlen=_ASSIGNMENTS))
            ),
        }

    def _picture(self, engines: Sequence[EngineState]) -> dict[str, Any]:
        """Return steps and nodes, worked out once per sample, however many pages watch."""
        if self._pictured[0] != self.history.last_seq:
            picture = {
                "window_s": self._window.span_s,
                "steps": steps(engines, self._window),
                "nodes": nodes(engines, self._window),
            }
            self._pictured = (self.history.last_seq, picture)
        return self._pictured[1]

    def _read_bytes(self, role: Role) -> float:
        return sum(
            self._window.moved(engine.info.engine_id, "storage_read_bytes", last_tick=True)
            for engine in self._registry.all()
            if engine.info.role is role
        )


def _sample_number(since: str) -> int:
    # As much as a page could ever have seen: int() would take any number of digits.
    if not (since.isascii() and since.isdigit() and len(since) <= 12):
        raise BadRequestError(
            f"since is {since[:40]!r}, must be a sample's number of at most 12 digits; leave it "
            "out for all samples"
        )
    return int(since)


def _liveness(engines: Iterable[EngineState], role: Role) -> dict[str, int]:
    found = [engine for engine in engines if engine.info.role is role]
    up = sum(engine.alive for engine in found)
    left = sum(engine.left for engine in found)
    return {"up": up, "lost": len(found) - up - left, "left": left}


def _lost(engines: Iterable[EngineState], now_s: float) -> list[dict[str, Any]]:
    lost = [engine for engine in engines if not engine.alive and not engine.left]
    lost.sort(key=lambda engine: engine.heard_s, reverse=True)
    return [
        {
            "engine_id": engine.info.engine_id,
            "role": engine.info.role.value,
            "group": engine.info.dp.group if engine.info.dp else "",
            "node": engine.info.node,
            "silent_s": max(now_s - engine.heard_s, 0.0),
        }
        for engine in lost[:_LOST_ENGINES]
    ]
