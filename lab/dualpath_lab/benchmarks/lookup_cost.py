"""Number of `stat` calls of look-ups, and blocks found while others are being written.

    python -m dualpath_lab.benchmarks.lookup_cost [--directory DIR] [--stat-s 0.001]

First table:  `stat` calls of one look-up of 1,000 blocks, cold (the engine has just started) and
warm (the same look-up again), by the number of stored blocks.  Second: conversations while their
last blocks are being written, and as many that are completely stored, all looked up concurrently.
Files are empty markers; writes follow each other and take a fixed time.  These are counts, decided
by deadlines.  Third: the duration of a look-up with an injected delay of ``--stat-s`` per `stat`.
"""

import argparse
import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from dualpath.core.blocks import BlockGeometry, BlockKey, StoreNamespace, block_keys
from dualpath.core.control import EngineMessage, Lookup, LookupDone
from dualpath.engine.counters import Counter, Counters
from dualpath.engine.io.lookups import Lookups
from dualpath.engine.io.persister import PendingWrites
from dualpath.engine.threads import OS_THREADS, TimeLimit
from dualpath.report import markdown
from dualpath.report.model import Table
from dualpath.router.scheduler.attempt import ENGINE_SHARE
from dualpath.router.settings import RouterSettings
from dualpath.storage.posix import ORACLE, LengthOnlyStorage
from dualpath.storage.wrapping import LookupCachingStorage

GEOMETRY = BlockGeometry.uniform(layers=1, block_tokens=1, layer_block_bytes=1)
NAMESPACE = StoreNamespace("benchmark", "u8", "none", GEOMETRY, mode=ORACLE)
CHAIN_BLOCKS = 1000
PENDING_BLOCKS = 6
#: As in the router, which may send a look-up to two engines one after the other.
DEADLINE_S = ENGINE_SHARE * RouterSettings().lookup_timeout_s / 2
TICK_S = 0.05
CLOSE_S = 10.0


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


def count_stats(boundaries: Iterable[int], directory: Path | None) -> Table:
    rows = []
    for stored in boundaries:
        keys = block_keys(range(CHAIN_BLOCKS), 1, cache_salt=str(stored))
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            write(Path(folder), keys[:stored])
            engine = Engine(Path(folder))
            cold, warm = (
                engine.count_stat_calls(keys, stored),
                engine.count_stat_calls(keys, stored),
            )
            engine.lookups.close(TimeLimit(OS_THREADS, CLOSE_S))
        rows.append((f"{stored:,}", str(cold), str(warm)))
    title = f"stats of a look-up of {CHAIN_BLOCKS:,} blocks"
    return Table(title, ("blocks stored", "cold", "warm"), tuple(rows))


def time_slow_stats(
    boundaries: Iterable[int], stat_s: float, rounds: int, directory: Path | None
) -> Table:
    rows = []
    for stored in boundaries:
        keys = block_keys(range(CHAIN_BLOCKS), 1, cache_salt=str(stored))
        took_ms: list[tuple[float, float]] = []
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            write(Path(folder), keys[:stored])
            for _ in range(rounds):
                engine = Engine(Path(folder), stat_s)
                times_s = [time.perf_counter()]
                for _ in ("cold", "warm"):
                    assert engine.look_up([keys]) == [stored]
                    times_s.append(time.perf_counter())
                cold_s, warm_s = (end - start for start, end in itertools.pairwise(times_s))
                took_ms.append((cold_s * 1e3, warm_s * 1e3))
                engine.lookups.close(TimeLimit(OS_THREADS, CLOSE_S))
        cold_ms, warm_ms = zip(*took_ms, strict=True)
        cells = (statistics.median(cold_ms), max(cold_ms), statistics.median(warm_ms))
        rows.append((f"{stored:,}", *(f"{cell:.1f}" for cell in cells)))
    title = f"a look-up of {CHAIN_BLOCKS:,} blocks, {stat_s * 1e3:g} ms per stat, {rounds} times"
    columns = ("blocks stored", "cold, median ms", "cold, most ms", "warm, median ms")
    return Table(title, columns, tuple(rows))


def find_under_load(conversations: int, write_s: float, directory: Path | None) -> Table:
    pending, whole = (
        [block_keys(range(100), 1, cache_salt=f"{kind} {i}") for i in range(conversations)]
        for kind in ("pending", "whole")
    )
    late = [key for keys in pending for key in keys[-PENDING_BLOCKS:]]
    with tempfile.TemporaryDirectory(dir=directory) as folder:
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
                    time.sleep(write_s)
                    engine.storage.write([key], blank([key]))
                engine.pending.end([key])

        writer = threading.Thread(target=write_late)
        writer.start()
        found = engine.look_up([*pending, *whole])
        over.set()
        writer.join()
        engine.lookups.close(TimeLimit(OS_THREADS, CLOSE_S))
    blocks = 100 * conversations
    rows = (
        ("last 6 being written", f"{sum(found[:conversations]) / blocks:.1%}"),
        ("all stored", f"{sum(found[conversations:]) / blocks:.1%}"),
    )
    title = f"2 x {conversations} conversations of 100 blocks, looked up at once"
    return Table(title, ("conversations", "blocks found"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--directory", type=Path, help="on the file system to use")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--write-s", type=float, default=0.5, help="duration of writing a block")
    parser.add_argument("--stat-s", type=float, default=0.001, help="duration of a stat")
    parser.add_argument("--rounds", type=int, default=21)
    args = parser.parse_args()
    for table in (
        count_stats((0, 1, 250, 500, 700, 999, 1000), args.directory),
        time_slow_stats((0, 1, 500, 999, 1000), args.stat_s, args.rounds, args.directory),
        find_under_load(args.conversations, args.write_s, args.directory),
    ):
        print(markdown.table(table))


if __name__ == "__main__":
    main()
