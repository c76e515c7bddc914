"""Number of `stat` calls of look-ups, and blocks found while others are being written.

First table:  `stat` calls of one look-up of 1,000 blocks, cold (the engine has just started) and
warm (the same look-up again), by the number of stored blocks.  Second: conversations while their
last blocks are being written, and as many that are completely stored, all looked up concurrently.
Files are empty markers; writes follow each other and take a fixed time.  These are counts, decided
by deadlines.  Third: the duration of a look-up with an injected delay of ``--stat-s`` per `stat`.
"""

import itertools
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from dualpath.core.blocks import BlockGeometry, BlockKey, StoreNamespace, block_keys
from dualpath.core.control import EngineMessage, Lookup, LookupDone
from dualpath.core.settings import Setting, Settings
from dualpath.engine.counters import Counter, Counters
from dualpath.engine.io.lookups import Lookups
from dualpath.engine.io.persister import PendingWrites
from dualpath.engine.threads import OS_THREADS, TimeLimit
from dualpath.router.scheduler.attempt import ENGINE_SHARE
from dualpath.router.settings import RouterSettings
from dualpath.storage.posix import ORACLE, LengthOnlyStorage
from dualpath.storage.wrapping import LookupCachingStorage
from dualpath_sim.harness.experiment import (
    Experiment,
    Page,
    Progress,
    RawData,
    Stage,
    one_stage,
)
from dualpath_sim.harness.numbers import Column, Numbers, key_results, number_table

GEOMETRY = BlockGeometry.uniform(layers=1, block_tokens=1, layer_block_bytes=1)
NAMESPACE = StoreNamespace("benchmark", "u8", "none", GEOMETRY, mode=ORACLE)
CHAIN_BLOCKS = 1000
PENDING_BLOCKS = 6
#: As in the router, which may send a look-up to two engines one after the other.
DEADLINE_S = ENGINE_SHARE * RouterSettings().lookup_timeout_s / 2
TICK_S = 0.05
CLOSE_S = 10.0


LOADED = "looked up at once"


class LookupSettings(Settings, frozen=True, kw_only=True):
    """Delays of the file system."""

    directory: Annotated[str, Setting("folder on the file system to use", metavar="DIR")] = ""
    conversations: Annotated[int, Setting("conversations of each kind", ge=1)] = 64
    write_s: Annotated[float, Setting("duration of writing a block", gt=0)] = 0.5
    stat_s: Annotated[float, Setting("duration of a slow stat", gt=0)] = 0.001
    repeat: Annotated[int, Setting("rounds", ge=1)] = 1


class SlowDirectory(LengthOnlyStorage):
    """A directory on a file system in which every `stat` takes ``stat_s``."""

    def __init__(self, root: Path, stat_s: float) -> None:
        super().__init__(root, NAMESPACE)
        self._stat_s = stat_s

    def is_stored(self, key: BlockKey) -> bool:
        """Look up after the delay."""
        time.sleep(self._stat_s)
        return super().is_stored(key)


class Engine:
    """The look-ups of one engine over a directory."""

    def __init__(self, root: Path, stat_s: float = 0.0) -> None:
        self.counters = Counters()
        self.pending = PendingWrites()
        self.storage = LookupCachingStorage(SlowDirectory(root, stat_s), OS_THREADS.now_ns)
        self.answers: dict[int, LookupDone] = {}
        self._arrived = threading.Condition()
        self.lookups = Lookups(self.storage, self.pending, self.counters, self._take)

    def _take(self, message: EngineMessage) -> None:
        assert isinstance(message, LookupDone)
        with self._arrived:
            self.answers[message.call_id] = message
            self._arrived.notify()

    def look_up(self, chains: Sequence[Sequence[BlockKey]]) -> list[int]:
        """Look up all chains concurrently; return the number of blocks found in each."""
        self.answers.clear()
        for call_id, keys in enumerate(chains):
            self.lookups.begin(Lookup(call_id, tuple(keys), DEADLINE_S))
        with self._arrived:
            while not self._arrived.wait_for(lambda: len(self.answers) == len(chains), TICK_S):
                self.lookups.expire(OS_THREADS.now_ns())
        return [self.answers[call_id].hit_blocks for call_id in range(len(chains))]

    def count_stat_calls(self, keys: Sequence[BlockKey], stored: int) -> int:
        """Return the number of `stat` calls of a look-up, which must find all stored blocks."""
        before = self.counters.snapshot()[Counter.LOOKUP_PROBES]
        assert self.look_up([keys]) == [stored]
        return int(self.counters.snapshot()[Counter.LOOKUP_PROBES] - before)


def write(root: Path, keys: Sequence[BlockKey]) -> None:
    """Store blocks as another engine would."""
    LengthOnlyStorage(root, NAMESPACE).write(keys, blank(keys))


def blank(keys: Sequence[BlockKey]) -> list[memoryview]:
    return [memoryview(b"\0")] * len(keys)


def _stat_calls(settings: LookupSettings, stored: int, number: int) -> Numbers:
    keys = block_keys(range(CHAIN_BLOCKS), 1, cache_salt=str(stored))
    with tempfile.TemporaryDirectory(dir=settings.directory or None) as folder:
        write(Path(folder), keys[:stored])
        engine = Engine(Path(folder))
        cold, warm = (engine.count_stat_calls(keys, stored) for _ in range(2))
        engine.lookups.close(TimeLimit(OS_THREADS, CLOSE_S))
    return {"cold_calls": cold, "warm_calls": warm}


def _slow(settings: LookupSettings, stored: int, number: int) -> Numbers:
    keys = block_keys(range(CHAIN_BLOCKS), 1, cache_salt=str(stored))
    with tempfile.TemporaryDirectory(dir=settings.directory or None) as folder:
        write(Path(folder), keys[:stored])
        engine = Engine(Path(folder), settings.stat_s)
        times_s = [time.perf_counter()]
        for _ in ("cold", "warm"):
            assert engine.look_up([keys]) == [stored]
            times_s.append(time.perf_counter())
        engine.lookups.close(TimeLimit(OS_THREADS, CLOSE_S))
    cold_s, warm_s = (end - start for start, end in itertools.pairwise(times_s))
    return {"cold_ms": cold_s * 1e3, "warm_ms": warm_s * 1e3}


def _under_load(settings: LookupSettings) -> Numbers:
    conversations = settings.conversations
    pending, whole = (
        [block_keys(range(100), 1, cache_salt=f"{kind} {i}") for i in range(conversations)]
        for kind in ("pending", "whole")
    )
    late = [key for keys in pending for key in keys[-PENDING_BLOCKS:]]
    with tempfile.TemporaryDirectory(dir=settings.directory or None) as folder:
        for keys in pending:
            write(Path(folder), keys[:-PENDING_BLOCKS])
        for keys in whole:
            write(Path(folder), keys)
        engine = Engine(Path(folder))
        engine.pending.begin(late)
        over = threading.Event()

        def write_late() -> None:
            for key in late:
                if not over.is_set():
                    time.sleep(settings.write_s)
                    engine.storage.write([key], blank([key]))
                engine.pending.end([key])

        writer = threading.Thread(target=write_late)
        writer.start()
        found = engine.look_up([*pending, *whole])
        over.set()
        writer.join()
        engine.lookups.close(TimeLimit(OS_THREADS, CLOSE_S))
    blocks = 100 * conversations
    return {
        "pending_share": sum(found[:conversations]) / blocks,
        "stored_share": sum(found[conversations:]) / blocks,
    }


def _stages(settings: LookupSettings, progress: Progress) -> Iterator[Stage[Any, Numbers]]:
    counted = {f"{stored:,} stored": stored for stored in (0, 1, 250, 500, 700, 999, 1000)}
    timed = {f"{stored:,} stored, slow stat": stored for stored in (0, 1, 500, 999, 1000)}
    yield from one_stage(counted, partial(_stat_calls, settings))
    yield from one_stage(timed, partial(_slow, settings))
    yield from one_stage({LOADED: None}, lambda _, number: _under_load(settings))


def draw(raw: RawData[LookupSettings, Numbers]) -> Page:
    """Draw counts, times and shares."""
    settings = raw.settings
    counts = [
        Column("cold", "cold_calls", "{:.0f}", tolerance=0.0, any_machine=True),
        Column("warm", "warm_calls", "{:.0f}", tolerance=0.0, any_machine=True),
    ]
    times = [
        Column("cold, median ms", "cold_ms", "{:.1f}"),
        Column("cold, most ms", "cold_ms", "{:.1f}", of=max),
        Column("warm, median ms", "warm_ms", "{:.1f}"),
    ]
    shares = [
        Column("last 6 being written", "pending_share", "{:.1%}", tolerance=0.1, any_machine=True),
        Column("all stored", "stored_share", "{:.1%}", tolerance=0.0, any_machine=True),
    ]
    chain = f"a look-up of {CHAIN_BLOCKS:,} blocks"
    load = f"Blocks found of 2 x {settings.conversations} conversations of 100, looked up at once"
    return Page(
        settings=(f"A slow stat takes {settings.stat_s * 1e3:g} ms.",),
        tables=(
            number_table(raw, f"stat calls of {chain}", counts, "blocks stored"),
            number_table(raw, f"Time of {chain}", times, "blocks stored"),
            number_table(raw, load, shares, "conversations"),
        ),
        results=tuple(key_results(raw, [*counts, *shares])),
    )


LOOKUPS = Experiment(
    name="lookups",
    title="Look-ups in a directory",
    settings=LookupSettings(),
    result=Numbers,
    stages=_stages,
    draw=draw,
)
