"""One run of the demo: histories are computed once, and every mode starts with the same storage.

Clusters are started in pairs, while no other is being measured: first the one that stores histories
together with Oracle's, then those of the modes that read, as soon as Oracle's run has determined
the storage rate.  A measured cluster is stopped while others start, and always before the next
measurement.
"""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Protocol

import msgspec

from dualpath.core.blocks import StoreNamespace
from dualpath.core.errors import DeadlineError, EngineLostError
from dualpath.core.modes import Mode
from dualpath.engine.io.read_speed import PROBE_MODEL
from dualpath.launch.local_cluster import LocalCluster
from dualpath.launch.settings import LocalClusterSettings
from dualpath.storage.posix import BLOCK_SUFFIX, copy_lengths, namespaces_in
from dualpath.workload.replay.client import ReplayOptions, replay
from dualpath.workload.replay.progress import ConsoleProgress, ProgressState
from dualpath.workload.replay.result import ReplayResult
from dualpath_lab.demo.sessions import MidSessionAgent
from dualpath_lab.demo.settings import DemoSettings, cluster_settings, history_settings

# -------------------------------------------------------------------------------------------- rate
# Chooses the storage rate at which loading matters as much as in the paper.
#
# On one machine the page cache would make loading almost free, so reads of each engine are
# throttled; the throttle stands for the storage NIC of a node.  With a fixed rate, loading would
# dominate on a fast machine and be negligible on a slow one.  So the rate is calibrated with
# Oracle's run (§7.2), which computes the same tokens but loads nothing: storage is throttled so
# that Basic's reads take ``LOAD_SHARE`` times as long as that run.  At 1P1D (DS 27B, §7.3) the
# paper's Basic takes up to 1.78 times as long as DualPath, and DualPath 1.09 to 1.85 times as long
# as Oracle: so Basic takes up to 3.3 times as long as Oracle, with more agents longer.

#: Time of Basic's reads, as a multiple of Oracle's job completion time.
LOAD_SHARE = 2.8


class ChosenRate(msgspec.Struct, frozen=True):
    """The storage rate ``bytes_per_s`` of each engine, for hits of ``load_bytes`` in total."""

    bytes_per_s: float
    load_bytes: int
    oracle_jct_s: float

    def line(self) -> str:
        """Return a line that explains the choice."""
        return (
            f"Storage is throttled to {self.bytes_per_s / 1e6:.1f} MB/s per engine: Oracle's run "
            f"took {self.oracle_jct_s:.1f} s here, and at this rate reading the "
            f"{self.load_bytes / 1e6:,.0f} MB that agents hit through one path takes "
            f"{LOAD_SHARE:g} times as long, about as in the paper for Basic at 1P1D (§7.3, DS 27B)."
        )


def choose_rate(oracle: ReplayResult, namespace: StoreNamespace, prefill: int) -> ChosenRate:
    """Return the rate for ``prefill`` engines that read in mode Basic."""
    hit_tokens = oracle.summary.hit_tokens or oracle.summary.ideal_hit_tokens
    geometry = namespace.geometry
    load_bytes = hit_tokens // geometry.block_tokens * geometry.full_block_bytes
    jct_s = oracle.summary.jct_s
    return ChosenRate(max(load_bytes, 1) / (LOAD_SHARE * jct_s * prefill), load_bytes, jct_s)


# --------------------------------------------------------------------------------------- time left
# Estimates the remaining time of a run of several stages from the stages that have ended.


class TimeLeft:
    """``expected_s`` are times of stages on some machine, scaled by the times of stages that ended.

    Stages must begin in order.  ``now_s`` is a clock.
    """

    def __init__(self, expected_s: Mapping[str, float], now_s: Callable[[], float]) -> None:
        self._expected_s = dict(expected_s)
        self._now_s = now_s
        self._over_s = 0.0
        self._over_expected_s = 0.0
        self._current = ""
        self._since_s = now_s()

    def begin(self, stage: str) -> None:
        """End the current stage and begin ``stage``."""
        now_s = self._now_s()
        if self._current:
            self._over_s += now_s - self._since_s
            self._over_expected_s += self._expected_s.pop(self._current)
        self._current, self._since_s = stage, now_s

    def expect(self, stage: str, seconds: float) -> None:
        """Set the expected time of a stage on this machine."""
        self._expected_s[stage] = seconds / self._pace

    def left_s(self, done: float = 0.0) -> float:
        """Return the remaining seconds; ``done`` (0 to 1) is the share of the current stage."""
        current_s = self._expected_s.get(self._current, 0.0)
        return (sum(self._expected_s.values()) - done * current_s) * self._pace

    @property
    def _pace(self) -> float:
        return self._over_s / self._over_expected_s if self._over_expected_s else 1.0


HISTORIES = "histories"
_ENGINES = "engines"
#: Run id for the agents' cache salts, the same in all modes so that all hit the histories.
_RUN_ID = "demo"
_STORED_TIMEOUT_S = 60.0
_POLL_S = 0.1
#: Seconds on two fast cores; `TimeLeft` scales them to this machine.
_START_S, _HISTORIES_S, _ORACLE_S = 15.0, 13.0, 10.0
#: Approximate times of modes as multiples of Oracle's; modes not listed use two paths.
_TIMES_ORACLE = {
    Mode.ORACLE: 1.0,
    Mode.BASIC: 1.15 * LOAD_SHARE,
    Mode.LAYERWISE: 1.1 * LOAD_SHARE,
}
_TIMES_ORACLE_DUAL = 0.68 * LOAD_SHARE


class Cluster(Protocol):
    """The methods of ``LocalCluster`` that a run uses."""

    @property
    def endpoint(self) -> str:
        """The URL of the router."""

    def launch(self) -> None:
        """Start all processes without waiting for them."""

    def wait_ready(self) -> None:
        """Wait until the cluster serves requests."""

    def stop(self) -> None:
        """End all processes."""


class DemoRun:
    """A run; as a context manager it ends all processes and removes all stored blocks at exit.

    ``encode`` is the tokenizer of ``model``.  ``show`` is called with lines for the user.
    """

    def __init__(
        self,
        demo: DemoSettings,
        model: Path,
        agents: Sequence[MidSessionAgent],
        trace: str,
        out: Path,
        encode: Callable[[str], Sequence[int]],
        show: Callable[[str], None],
        make_cluster: Callable[[LocalClusterSettings], Cluster] = LocalCluster,
    ) -> None:
        self._demo = demo
        self._model = model
        self._agents = agents
        self._trace = trace
        self._out = out
        self._show = show
        self._encode = encode
        self._make_cluster = make_cluster
        self._clusters: dict[str, Cluster] = {}
        self._played: list[str] = []
        self._time = TimeLeft(_expected_s(demo.in_order), time.monotonic)
        #: None if the storage rate was given, or before Oracle's run.
        self.chosen: ChosenRate | None = None

    def __enter__(self) -> "DemoRun":
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dualpath-demo-"))
            self._folder = Path(folder)
            stack.callback(self._stop_all)
            self._left = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._left.close()

    def results(self) -> Iterator[ReplayResult]:
        """Yield the result of every mode, Oracle's first.

        Raises ``EngineLostError`` if a process ends or a history cannot be stored.
        """
        first, *others = _starts(self._demo.in_order)
        self._start(first)
        self._store_histories()
        for name in first[1:]:
            copy_lengths(self._storage(HISTORIES), self._storage(name))
            yield self._play(Mode(name))
        for together in others:
            for name in together:
                _link_tree(self._storage(HISTORIES), self._storage(name))
            self._start(together)
            for name in together:
                yield self._play(Mode(name))

    def _start(self, names: Sequence[str]) -> None:
        stage = _stage_of(names)
        self._time.begin(stage)
        self._show(f"starting {stage}; about {self._time.left_s():.0f} s left in total")
        for name in names:
            self._clusters[name] = self._make_cluster(self._settings(name))
            self._clusters[name].launch()
        self._stop_played()
        for name in names:
            self._clusters[name].wait_ready()

    def _settings(self, name: str) -> LocalClusterSettings:
        demo, model, storage, out = self._demo, self._model, str(self._storage(name)), self._out
        if name == HISTORIES:
            return history_settings(demo, model, storage, out, name)
        rate = self.chosen.bytes_per_s if self.chosen else demo.snic_bytes_per_s
        return cluster_settings(Mode(name), demo, model, storage, out, rate, name)

    def _store_histories(self) -> None:
        self._time.begin(HISTORIES)
        stored = self._replay(HISTORIES, histories_only=True)
        if stored.failed:
            errors = [turn.error for turn in stored.turns if turn.error]
            raise EngineLostError(
                f"{len(errors)} histories were not stored, the first error: {errors[:1]}; see the "
                f"logs in {self._out / 'logs' / HISTORIES}"
            )
        block_tokens = stored.setting.block_tokens
        self._await_blocks(sum(turn.prompt_tokens // block_tokens for turn in stored.turns))
        self._played.append(HISTORIES)

    def _await_blocks(self, blocks: int) -> None:
        """Wait until all blocks are stored, because engines write them after their answers."""
        deadline_s = time.monotonic() + _STORED_TIMEOUT_S
        while (found := _blocks_in(self._storage(HISTORIES))) < blocks:
            if time.monotonic() > deadline_s:
                raise DeadlineError(
                    f"{found} of {blocks} blocks of histories were stored within "
                    f"{_STORED_TIMEOUT_S:g} s; see the logs in {self._out / 'logs' / HISTORIES}"
                )
            time.sleep(_POLL_S)

    def _play(self, mode: Mode) -> ReplayResult:
        self._time.begin(mode.value)
        self._stop_played()
        result = self._replay(mode.value)
        self._played.append(mode.value)
        if mode is Mode.ORACLE and not self._demo.snic_bytes_per_s:
            self._choose(result)
        return result

    def _choose(self, oracle: ReplayResult) -> None:
        ((_, namespace),) = _namespaces(self._storage(HISTORIES))
        self.chosen = choose_rate(oracle, namespace, self._demo.prefill)
        self._show(self.chosen.line())
        for mode in self._demo.in_order[1:]:
            self._time.expect(mode.value, _times_oracle(mode) * oracle.summary.jct_s)

    def _replay(self, name: str, *, histories_only: bool = False) -> ReplayResult:
        demo = self._demo
        histories = [agent.history for agent in self._agents]
        sessions = histories if histories_only else [agent.rest for agent in self._agents]
        options = ReplayOptions(
            seed=demo.seed,
            max_context_tokens=demo.max_context_tokens,
            scale_generate=demo.scale_generate,
            run_id=_RUN_ID,
            label=name,
            trace=self._trace,
            trace_format="sessions started in the middle",
        )

        def left_s(state: ProgressState) -> float:
            return self._time.left_s(state.turns_done / max(state.turns_total, 1))

        with ConsoleProgress(name, left_s=left_s) as progress:
            return asyncio.run(
                replay(
                    sessions,
                    self._clusters[name].endpoint,
                    options,
                    encode=self._encode,
                    histories=() if histories_only else histories,
                    progress=progress,
                )
            )

    def _storage(self, name: str) -> Path:
        return self._folder / name

    def _stop(self, name: str) -> None:
        self._clusters.pop(name).stop()
        if name != HISTORIES:
            shutil.rmtree(self._storage(name), ignore_errors=True)

    def _stop_played(self) -> None:
        while self._played:
            self._stop(self._played.pop())

    def _stop_all(self) -> None:
        for name in list(self._clusters):
            self._stop(name)


def _starts(modes: Sequence[Mode]) -> list[list[str]]:
    """Return which clusters start together: first the histories' cluster with Oracle's, if any."""
    ahead = [mode.value for mode in modes if mode is Mode.ORACLE]
    reading = [mode.value for mode in modes if mode is not Mode.ORACLE]
    pairs = [reading[first : first + 2] for first in range(0, len(reading), 2)]
    return [[HISTORIES, *ahead], *pairs]


def _stage_of(names: Sequence[str]) -> str:
    return f"{_ENGINES} of {' and '.join(names)}"


def _expected_s(modes: Sequence[Mode]) -> dict[str, float]:
    """Return the expected seconds of each stage."""
    stages = {_stage_of(names): _START_S for names in _starts(modes)}
    stages |= {mode.value: _times_oracle(mode) * _ORACLE_S for mode in modes}
    return stages | {HISTORIES: _HISTORIES_S}


def _times_oracle(mode: Mode) -> float:
    return _TIMES_ORACLE.get(mode, _TIMES_ORACLE_DUAL)


def _namespaces(storage: Path) -> list[tuple[Path, StoreNamespace]]:
    """Return the folders and namespaces with the agents' blocks: one, as soon as there is any.

    The namespace in which engines without a given rate measure it is not included.
    """
    found = namespaces_in(storage)
    return [(folder, namespace) for folder, namespace in found if namespace.model != PROBE_MODEL]


def _blocks_in(storage: Path) -> int:
    folders = (folder for folder, _ in _namespaces(storage))
    return sum(1 for folder in folders for _ in folder.rglob(f"*{BLOCK_SUFFIX}"))


def _link_tree(source: Path, target: Path) -> None:
    """Copy the tree with hard links to all blocks, because stored blocks never change."""
    shutil.copytree(source, target, copy_function=lambda a, b: Path(b).hardlink_to(a))
