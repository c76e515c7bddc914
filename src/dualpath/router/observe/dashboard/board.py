"""The body of ``GET /dualpath/v1/dashboard``: the present state and a history of ten minutes.

Sampled once a second, whether or not somebody looks; a sample costs O(engines + open requests).
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.errors import BadRequestError
from dualpath.core.modes import Mode
from dualpath.router.control.assign_log import AssignmentNote
from dualpath.router.control.engine_state import EngineState
from dualpath.router.control.registry import Registry
from dualpath.router.observe.dashboard.engine_window import EngineWindow
from dualpath.router.observe.dashboard.history import History, Sample, median_and_p90
from dualpath.router.observe.dashboard.nodes import nodes, steps
from dualpath.router.observe.metrics import RouterMetrics
from dualpath.router.observe.status import ORACLE_NOTE, model_name
from dualpath.router.requests.records import RequestRecord

#: Raised whenever a field changes its meaning.
SCHEMA = "dualpath.dashboard/1"
SAMPLE_S = 1.0
#: Rates are means over so many samples: engines report every 0.5 s, so single ones are ragged.
_WINDOW_SAMPLES = 5
_ASSIGNMENTS = 16
_LOST_ENGINES = 16
#: More requests than can end between two samples.
_ENDED_KEPT = 16384


class Load(NamedTuple):
    """What only the service knows: open requests, how many have engines, latest decisions."""

    open_requests: Iterable[RequestRecord]
    waiting: int
    running: int
    assignments: Iterable[AssignmentNote]


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
        self._ended: deque[RequestRecord] = deque(maxlen=_ENDED_KEPT)
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
            "waiting": load.waiting,
            "running": load.running,
            "engines": {role.value: _liveness(engines, role) for role in Role},
            "lost_engines": _lost(engines, now_s),
            **self._picture(engines),
            "recent": self.history.recent_ttft(),
            "history": self.history.since(seq),
            "assignments": [
                msgspec.to_builtins(note)
                for note in reversed(deque(load.assignments, maxlen=_ASSIGNMENTS))
            ],
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
