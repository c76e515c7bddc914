"""Measure a storage's janitor: hits compared with an ideal LRU, its CPU share, and its start.

A day: generated trajectories (means of Table 2, 32K) begin at random times of a day; their turns
follow after pauses.  Files, journals, index, lease and removals are real, in a directory; the clock
is virtual and the payload small.  It is compared with an ideal LRU of the same quota in memory,
which knows every use at once and never exceeds the quota.  A start: a janitor starts on a storage
with a saved index of this many blocks and selects blocks to remove.
"""

import heapq
import resource
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np

from dualpath.core.blocks import BlockKey, BlockOrigin, chain_root
from dualpath.core.settings import Setting, Settings
from dualpath.report.model import Table, cell
from dualpath.storage import janitor as index_file
from dualpath.storage.block_file import Sections, encode_header
from dualpath.storage.chain_index import NO_PINS, ChainIndex, victims
from dualpath.storage.contract import run_origins
from dualpath.storage.janitor import Janitor
from dualpath.storage.journal import Journal
from dualpath.storage.maintenance import BEAT_S, StorageMaintenance
from dualpath.storage.objects import PosixObjects
from dualpath.storage.posix import object_name
from dualpath.storage.quotas import StorageLimits, WriteGate
from dualpath.workload.columns.generator import DATASETS, GeneratorSettings, generate
from dualpath_sim.harness.experiment import Experiment, Page, RawData, one_stage
from dualpath_sim.harness.numbers import Column, Numbers, key_results, summary

PLACE, DIGEST = "model_0123456789abcdef", "0123456789abcdef"
PAYLOAD = bytes(512)
BLOCK_BYTES = 4096 + len(PAYLOAD)
BLOCK_TOKENS = 64
DAY_S = 86400.0
ENGINES = 4
#: Agents begin with one of this many system prompts.
PROMPTS, PROMPT_BLOCKS = 8, 32
MEAN_PAUSE_S = 60.0


class QuotaSettings(Settings, frozen=True, kw_only=True):
    """Load and sizes."""

    trajectories: Annotated[int, Setting("trajectories of the day", ge=1)] = 120
    quota_share: Annotated[int, Setting("the quota is 1/N of all blocks", ge=1)] = 20
    blocks: Annotated[int, Setting("blocks of the index at a start", ge=500)] = 1_000_000
    directory: Annotated[str, Setting("folder on the file system to use", metavar="DIR")] = ""
    seed: Annotated[int, Setting("of trajectories and keys", ge=0)] = 0


class Turn(NamedTuple):
    """A request of ``agent`` at ``time_s`` with ``prompt`` blocks; ``end`` are stored after it."""

    time_s: float
    agent: int
    prompt: int
    end: int


def turns_of_a_day(trajectories: int, seed: int) -> Iterator[Turn]:
    """Yield turns in order of time."""
    columns = generate(DATASETS["32K"], seed, GeneratorSettings(trajectories=trajectories))
    rng = np.random.default_rng([seed, 11])
    starts_s = rng.uniform(0, DAY_S, trajectories)

    def turns(agent: int) -> Iterator[Turn]:
        time_s, tokens = float(starts_s[agent]), PROMPT_BLOCKS * BLOCK_TOKENS
        for turn in range(int(columns.first_round[agent]), int(columns.first_round[agent + 1])):
            tokens += int(columns.append_tokens[turn])
            prompt = tokens // BLOCK_TOKENS
            tokens += int(columns.generated_tokens[turn])
            yield Turn(time_s, agent, prompt, tokens // BLOCK_TOKENS)
            time_s += float(rng.exponential(MEAN_PAUSE_S))

    yield from heapq.merge(*(list(turns(agent)) for agent in range(trajectories)))


def key_of(agent: int, block: int) -> BlockKey:
    """Return the key of a block; blocks of a system prompt are shared."""
    owner = agent % PROMPTS - PROMPTS if block < PROMPT_BLOCKS else agent
    return np.random.default_rng([owner + PROMPTS, block]).bytes(32)


class IdealLru:
    """An LRU cache of as many blocks as the quota allows; a use of a prefix uses all its blocks."""

    def __init__(self, most_blocks: int) -> None:
        self._most = most_blocks
        self._blocks: OrderedDict[BlockKey, None] = OrderedDict()

    def serve(self, keys: Sequence[BlockKey], prompt: int) -> int:
        """Return the number of hit blocks and store all of ``keys``."""
        hit = next((n for n, key in enumerate(keys[:prompt]) if key not in self._blocks), prompt)
        for key in reversed(keys):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)
        return hit


class RecordedObjects(PosixObjects):
    """Files with the set of their names, as look-ups of engines are not measured."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.blocks: set[str] = set()

    def remove(self, names: Sequence[str]) -> int:
        """Remove the files and their names."""
        self.blocks.difference_update(names)
        return super().remove(names)


class JanitorStorage:
    """A storage with a janitor in a directory, on a virtual clock."""

    def __init__(self, root: Path, limits: StorageLimits) -> None:
        self.now_s, self.cpu_s, self.written_blocks = 0.0, 0.0, 0
        self.tree = RecordedObjects(root)
        journals = [Journal(self.tree, PLACE, f"engine-{n}") for n in range(ENGINES)]
        self.engines = [
            StorageMaintenance(self.tree, journal, WriteGate(), None, self._now, self._now)
            for journal in journals
        ]
        self.janitor = Janitor(self.tree, "janitor", limits, self._now, self._now)

    def _now(self) -> float:
        return self.now_s

    def step(self) -> None:
        """Run the maintenance of one interval."""
        for engine in self.engines:
            engine.tick()
        began_s = time.process_time()
        self.janitor.step()
        self.cpu_s += time.process_time() - began_s

    def serve(self, agent: int, keys: Sequence[BlockKey], prompt: int) -> int:
        """Return the number of hit blocks and write the missing ones."""
        engine = self.engines[agent % ENGINES]
        names = [object_name(PLACE, key) for key in keys]
        stored = self.tree.blocks
        hit = next((n for n, name in enumerate(names[:prompt]) if name not in stored), prompt)
        if hit:
            engine.used(keys[hit - 1])
        origin = BlockOrigin(keys[hit - 1] if hit else chain_root())
        count, _ = engine.admitted(keys[hit:], origin, BLOCK_BYTES)
        new = keys[hit : hit + count]
        for name, key, own in zip(names[hit:], new, run_origins(new, origin), strict=False):
            if name not in stored:
                self.tree.replace(
                    name, encode_header(key, DIGEST, Sections([PAYLOAD]), own) + PAYLOAD
                )
                stored.add(name)
        engine.written(new, origin, [BLOCK_BYTES] * len(new))
        self.written_blocks += count
        return hit

    def used_bytes(self) -> int:
        """Return the bytes in the storage, from the file system."""
        return sum(info.bytes for info in self.tree.objects(f"{PLACE}/"))


def day(settings: QuotaSettings) -> Numbers:
    """Simulate a day and return its numbers."""
    turns = list(turns_of_a_day(settings.trajectories, settings.seed))
    last: dict[int, int] = {}
    for turn in turns:
        last[turn.agent] = turn.end
    chains = {agent: [key_of(agent, n) for n in range(end)] for agent, end in last.items()}
    written = len({key for keys in chains.values() for key in keys})
    quota = written // settings.quota_share
    limits = StorageLimits(quota_bytes=quota * BLOCK_BYTES)
    ideal, hits, ideal_hits, prompt_tokens = IdealLru(quota), 0, 0, 0
    most = most_between = since = 0
    with tempfile.TemporaryDirectory(dir=settings.directory or None) as folder:
        storage = JanitorStorage(Path(folder), limits)
        storage.step()
        next_step_s = BEAT_S
        began_s = time.monotonic()
        for turn in turns:
            while turn.time_s >= next_step_s:
                storage.now_s = next_step_s
                storage.step()
                next_step_s += BEAT_S
                most_between = max(most_between, storage.written_blocks - since)
                since = storage.written_blocks
            storage.now_s = turn.time_s
            keys = chains[turn.agent][: turn.end]
            hits += storage.serve(turn.agent, keys, turn.prompt)
            most = max(most, len(storage.tree.blocks))
            ideal_hits += ideal.serve(keys, turn.prompt)
            prompt_tokens += turn.prompt
        storage.step()
        real_bytes, index = storage.used_bytes(), storage.janitor.index
        assert index is not None
        passed_s = time.monotonic() - began_s
    refused = sum(engine.stats.refused_blocks for engine in storage.engines)
    return {
        "turns": len(turns),
        "quota_blocks": quota,
        "written": storage.written_blocks / quota,
        "hit_share": hits / prompt_tokens,
        "ideal_share": ideal_hits / prompt_tokens,
        "to_ideal": hits / ideal_hits,
        "most": most / quota,
        "most_between": most_between / quota,
        "refused_blocks": refused,
        "miscounted_bytes": index.used_bytes - real_bytes,
        "removed_blocks": storage.janitor.totals.evicted_blocks,
        "cpu_share": storage.cpu_s / DAY_S,
        "passed_s": passed_s,
    }


def start(settings: QuotaSettings) -> Numbers:
    """Save an index of this many blocks, and time a janitor that starts with it."""
    rng = np.random.default_rng(settings.seed)
    index, chain_blocks, blocks = ChainIndex(), 500, settings.blocks
    for agent in range(blocks // chain_blocks):
        parent = chain_root()
        for key in (rng.bytes(32) for _ in range(chain_blocks)):
            index.add(PLACE, key, parent, "", BLOCK_BYTES, float(agent))
            parent = key
    limits = StorageLimits(quota_bytes=index.used_bytes * 2)
    with tempfile.TemporaryDirectory(dir=settings.directory or None) as folder:
        tree = PosixObjects(folder)
        began_s = time.monotonic()
        index_file.save(tree, 1, 1, index, index_file.Progress({}, surveyed_s=time.time()))
        saved_s = time.monotonic() - began_s
        size = sum(info.bytes for info in tree.objects(index_file.SAVED))
        del index
        janitor = Janitor(tree, "janitor", limits, time.time, time.monotonic)
        began_s = time.monotonic()
        janitor.step()
        started_s = time.monotonic() - began_s
        assert janitor.index is not None
        assert janitor.index.blocks == blocks
        began_s = time.monotonic()
        full = StorageLimits(quota_bytes=janitor.index.used_bytes)
        rows = victims(janitor.index, full, NO_PINS, time.time())
        planned_s = time.monotonic() - began_s
    return {
        "saved_s": saved_s,
        "saved_mb": size / 1e6,
        "started_s": started_s,
        "selected_blocks": len(rows),
        "selected_s": planned_s,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
    }


DAY, START = "a day", "start"
_DAY = [
    Column("turns", "turns", "{:,.0f}", tolerance=0.0, any_machine=True),
    Column("blocks of the quota", "quota_blocks", "{:,.0f}"),
    Column("blocks written, of the quota", "written", "{:.1f} x", tolerance=0.0, any_machine=True),
    Column("hit tokens, of prompt tokens", "hit_share", "{:.1%}"),
    Column("an ideal LRU's", "ideal_share", "{:.1%}"),
    Column("hit tokens, of the ideal's", "to_ideal", "{:.3f}", tolerance=0.0, any_machine=True),
    Column("maximum in storage, of the quota", "most", "{:.3f}", tolerance=0.0, any_machine=True),
    Column("maximum written between two steps, of the quota", "most_between", "{:.3f}"),
    Column("new blocks refused for the quota", "refused_blocks", "{:,.0f}"),
    Column("counted minus actual bytes at the end", "miscounted_bytes", "{:.0f} bytes"),
    Column("blocks removed", "removed_blocks", "{:,.0f}"),
    Column("janitor's CPU, of a core", "cpu_share", "{:.3%}", tolerance=0.25),
    Column("took", "passed_s", "{:.0f} s"),
]
_START = [
    Column("saved, s", "saved_s"),
    Column("saved, MB", "saved_mb", "{:.0f}", tolerance=0.05, any_machine=True),
    Column("started: size known, first step done, s", "started_s", tolerance=0.25),
    Column("blocks selected to remove", "selected_blocks", "{:,.0f}", tolerance=0.0),
    Column("selected, s", "selected_s", tolerance=0.25),
    Column("peak memory of the process, MB", "peak_mb", "{:.0f}"),
]


def draw(raw: RawData[QuotaSettings, Numbers]) -> Page:
    """Draw the numbers of both parts, one below the other."""
    parts = [(name, columns) for name, columns in ((DAY, _DAY), (START, _START)) if raw.of(name)]
    return Page(
        settings=(
            f"A day of {raw.settings.trajectories} trajectories with 1/{raw.settings.quota_share} "
            f"of their blocks as quota; a start with {raw.settings.blocks:,} blocks in chains of "
            f"500. Seed {raw.settings.seed}.",
        ),
        tables=tuple(
            Table(
                name,
                ("", ""),
                tuple((one.head, cell(summary(raw, name, one), one.form)) for one in columns),
            )
            for name, columns in parts
        ),
        results=tuple(key_results(raw, [*_DAY, *_START])),
    )


STORAGE_QUOTA = Experiment(
    name="storage-quota",
    title="A storage's janitor: hits compared with an ideal LRU, its CPU time, its start",
    settings=QuotaSettings(),
    result=Numbers,
    stages=lambda settings, progress: one_stage(
        {DAY: day, START: start}, lambda part, number: part(settings)
    ),
    draw=draw,
)
