"""A forward pass on each rank of an emulated prefill engine."""

import functools
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dualpath.core.cluster import Role
from dualpath.core.errors import DualPathError
from dualpath.core.transfers import DecodeTransfer
from dualpath.engine.control.surroundings import LIVE, Surroundings
from dualpath.engine.passes.forward_pass import ForwardPass
from dualpath.engine.passes.generated import GeneratedBlock
from dualpath.engine.passes.step_transfers import PrefillChunk
from dualpath.engine.ranks.follower import FollowedPass
from dualpath.engine.threads import Workers
from dualpath_lab.emulated.checkable_kv import CheckedAt, Counts, Seeds
from dualpath_lab.emulated.data_plane import FollowerPlane, RankPlane
from dualpath_lab.emulated.ranks import FollowerRank, LeaderRank, OnlyRank, ThreadRanks
from dualpath_lab.emulated.settings import EmulatedSettings

# ------------------------------------------------------------------------------------------- clock
# Emulated computation: the engine's thread sleeps for the computation's time.

#: A wait shorter than this did not block.
_NO_WAIT_S = 0.0002


class ComputeClock:
    """Runs work of known duration back to back on one emulated GPU, in real time.

    The GPU is busy until ``_free_s``.  A late wake-up does not delay the next work, which ends when
    it would have ended, unless the GPU had to wait for an input.  ``now`` is a monotonic clock in
    seconds; ``sleep`` may return late.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.now = now
        self._sleep = sleep
        self._free_s = 0.0

    def begin(self) -> None:
        """Record that the GPU was idle until now."""
        self._free_s = self.now()

    def waited(self, since_s: float) -> None:
        """Record that the GPU waited from ``since_s`` until now, if that wait blocked."""
        now_s = self.now()
        if now_s - since_s > _NO_WAIT_S:
            self._free_s = max(self._free_s, now_s)

    def work(self, seconds: float) -> None:
        """Compute for ``seconds``; returns when the work ends."""
        self._free_s += seconds
        left_s = self._free_s - self.now()
        if left_s > 0:
            self._sleep(left_s)


# ------------------------------------------------------------------------------------ decode steps
# A decode step on each rank of an emulated engine.


class Fill(NamedTuple):
    """A prompt to copy into HBM; ``number`` identifies the fill, ``seeds`` are of its blocks."""

    number: int
    decode_transfer: DecodeTransfer
    hbm_blocks: tuple[int, ...]
    seeds: Seeds


class NewToken(NamedTuple):
    """A token to compute: its HBM block, its position in the block, and its seed."""

    hbm_block: int
    place: int
    seed: np.uint64


class DecodeStep(NamedTuple):
    """The work of a step in order: tokens to compute, blocks to persist, fills to start."""

    tokens: tuple[NewToken, ...]
    full: tuple[GeneratedBlock, ...]
    fills: tuple[Fill, ...]


class Filled(NamedTuple):
    """Event of a rank: it has ended its share of a fill.

    ``error``: why the copy failed; ``wrong``: message about wrong KV; ``counts``: comparisons.
    """

    number: int
    error: str | None
    wrong: str | None
    counts: Counts


class RankSteps:
    """Computes a rank's slice of each token, starts fills and persists full blocks.

    A fill may take several steps; ``RankPlane.notify`` is called with ``Filled`` when it has ended.
    """

    def __init__(self, plane: RankPlane) -> None:
        self._plane = plane
        self._checks = Workers(plane.threads, "decode-transfer", 1)

    def run(self, step: DecodeStep) -> None:
        """Run this rank's share of a step; return when all ranks have finished theirs."""
        plane = self._plane
        if plane.moves_bytes:
            for token in step.tokens:
                plane.hbm.write_token(*token)
        if step.full:
            plane.mover.persist_generated(step.full)
        for fill in step.fills:
            blocks = fill.hbm_blocks[: len(fill.seeds)]
            plane.mover.fill_hbm(
                fill.decode_transfer, blocks, functools.partial(self._copied, fill)
            )
        plane.group.gather(None)

    def soon(self, work: Callable[[], None]) -> None:
        """Run ``work`` on the thread that verifies copies."""
        self._checks.submit(work)

    def close(self) -> None:
        """Wait for the current comparison."""
        self._checks.close()

    def _copied(self, fill: Fill, error: str | None) -> None:
        self.soon(functools.partial(self._check, fill, error))

    def _check(self, fill: Fill, error: str | None) -> None:
        transfer, wrong = fill.decode_transfer, None
        if error is None:
            wrong = self._plane.verify_hbm(
                CheckedAt.DE_HBM,
                transfer.request_id,
                fill.hbm_blocks[: len(fill.seeds)],
                fill.seeds,
                range(self._plane.geometry.layers),
                transfer.prompt_tokens - 1,
            )
        self._plane.notify(Filled(fill.number, error, wrong, self._plane.verifier.new_counts()))


class PassPart(NamedTuple):
    """A request's chunk in a pass; ``seeds`` of its prompt's blocks, up to the end of the chunk."""

    part: PrefillChunk
    seeds: Seeds


class PassWork(NamedTuple):
    """A pass to compute in ``compute_s``; ``wrong``: requests known to have wrong KV, and why."""

    parts: tuple[PassPart, ...]
    compute_s: float
    wrong: dict[str, str]


class PassFindings(NamedTuple):
    """A rank's report after a pass: requests with wrong KV, and its comparisons."""

    wrong: dict[str, str]
    counts: Counts


class PassResult(NamedTuple):
    """The result of a pass on all ranks: failed requests and requests with wrong KV, and why."""

    failures: dict[str, str]
    wrong: dict[str, str]


#: The next pass may start within this number of last layers of a pass: its first layers are loaded
#: as soon as regions become free, and requests that arrive until then can be part of it.
LAYERS_AHEAD = 2


class RunningPass:
    """A pass that has started on this rank; ``before``, if any, may still be running."""

    def __init__(
        self,
        work: PassWork,
        forward: ForwardPass | FollowedPass,
        before: "RunningPass | None" = None,
    ) -> None:
        self.work = work
        self.forward = forward
        self.wrong = dict(work.wrong)
        self._before = before

    def is_failed_or_wrong(self, request_id: str) -> bool:
        """Whether a request has failed or has wrong KV, so that it is no longer verified."""
        before = self._before
        return (
            request_id in self.wrong
            or self.forward.failed(request_id)
            or (before is not None and before.is_failed_or_wrong(request_id))
        )

    def finish(self) -> dict[str, str]:
        """Wait for the last transfers; return failed requests with reasons."""
        self._before = None
        return self.forward.finish(self.wrong)


class RankPasses:
    """Runs passes: for each layer waits for loads, verifies, computes, and writes new KV."""

    def __init__(self, plane: RankPlane) -> None:
        self._plane = plane
        self._clock = ComputeClock(plane.now_s, plane.threads.sleep)

    def run(self, work: PassWork) -> None:
        """Run this rank's share of a pass, on a follower rank."""
        running = self.begin(work)
        self.compute(running)
        self.end(running)

    def begin(self, work: PassWork, before: RunningPass | None = None) -> RunningPass:
        """Start this rank's transfers of a pass; the pass ``before`` it may still be running."""
        parts = [part.part for part in work.parts]
        forward = self._plane.begin_pass(parts, None if before is None else before.forward)
        return RunningPass(work, forward, before)

    def compute(
        self,
        running: RunningPass,
        start_next: Callable[[], None] = lambda: None,
        *,
        was_idle: bool = True,
    ) -> None:
        """Compute a pass; ``start_next`` is called at the start of each of the last layers.

        ``was_idle``: the GPU was idle before this pass.
        """
        if was_idle:
            self._clock.begin()
        since_s = self._clock.now()
        running.forward.enter()
        self._clock.waited(since_s)
        layers = self._plane.geometry.layers
        layer_s = running.work.compute_s / layers
        for layer in range(layers):
            if layer >= layers - LAYERS_AHEAD:
                start_next()
            if self._plane.moves_bytes:
                self._one_layer(running, layer, layer_s)
            else:
                self._clock.work(layer_s)

    def end(self, running: RunningPass) -> tuple[PassResult, list[PassFindings]]:
        """Wait for the last transfers; return this rank's result and the findings of each rank.

        Passes end in the order in which they started.
        """
        failures = running.finish()
        known = running.work.wrong
        new = {name: found for name, found in running.wrong.items() if name not in known}
        findings = self._plane.group.gather(PassFindings(new, self._plane.verifier.new_counts()))
        return PassResult(failures, running.wrong), findings

    def close(self) -> None:
        """Do nothing: no work runs between passes."""

    def _one_layer(self, running: RunningPass, layer: int, layer_s: float) -> None:
        forward, parts = running.forward, running.work.parts
        since_s = self._clock.now()
        forward.wait_loaded(layer)
        self._clock.waited(since_s)
        for part in parts:
            if not running.is_failed_or_wrong(part.part.transfer.request_id):
                self._check_loaded(part, layer, running.wrong)
        self._clock.work(layer_s)
        for part in parts:
            self._write_new(part, layer)
        since_s = self._clock.now()
        forward.computed(layer)
        self._clock.waited(since_s)

    def _check_loaded(self, part: PassPart, layer: int, wrong: dict[str, str]) -> None:
        computed, request_id = part.part, part.part.transfer.request_id
        found = self._plane.verify_hbm(
            CheckedAt.PE_HBM,
            request_id,
            computed.hbm_blocks[: computed.chunk.first],
            part.seeds,
            (layer,),
            computed.chunk.first * self._plane.geometry.block_tokens,
        )
        if found is not None:
            wrong[request_id] = found

    def _write_new(self, part: PassPart, layer: int) -> None:
        chunk = part.part.chunk
        self._plane.hbm.write_blocks(
            layer,
            part.part.hbm_blocks[chunk.first : chunk.end],
            part.seeds[chunk.first : chunk.end],
        )


# ------------------------------------------------------------------------------------------ follow
# A follower rank of an emulated engine, which does its share of the work that rank 0 sends.

log = logging.getLogger(__name__)


def follow(
    settings: EmulatedSettings, end: FollowerRank, surroundings: Surroundings = LIVE
) -> None:
    """Run a follower rank until rank 0 ends the engine.

    Raises ``ConfigError`` for HBM that cannot be allocated, ``EngineLostError`` if another rank has
    ended.
    """
    run_follower(FollowerPlane(settings, end, surroundings), end)


def run_follower(plane: FollowerPlane, end: FollowerRank) -> None:
    """Run a follower rank with an existing plane; see ``follow``."""
    prefills = plane.settings.engine.role is Role.PREFILL
    share: RankPasses | RankSteps = RankPasses(plane) if prefills else RankSteps(plane)
    plane.follower.watch()
    try:
        while (work := end.work()) is not None:
            share.run(work)
    finally:
        share.close()
        plane.follower.close()


def start_thread_ranks(settings: EmulatedSettings, surroundings: Surroundings = LIVE) -> LeaderRank:
    """Start the other ranks of an engine as threads of this process; return rank 0's interface."""
    size = settings.tensor_parallel_size
    if size == 1:
        return OnlyRank()
    ranks = ThreadRanks(size, surroundings.threads)

    def run(end: FollowerRank) -> None:
        reason = f"rank {end.rank} has ended"
        try:
            follow(settings, end, surroundings)
        except DualPathError as error:
            reason = f"rank {end.rank} has ended: {error}"
            log.critical("%s", reason)
        finally:
            ranks.rank_ended(reason)

    for end in ranks.followers:
        surroundings.threads.start(f"{settings.engine.engine_id}-follows", lambda end=end: run(end))  # type: ignore[misc]
    return ranks.leader
