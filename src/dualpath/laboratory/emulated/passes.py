"""A forward pass on each rank of an emulated prefill engine."""

from collections.abc import Callable
from typing import NamedTuple

from dualpath.engine.follower import FollowedPass
from dualpath.engine.forward_pass import ForwardPass, PromptPart
from dualpath.laboratory.emulated.clock import ComputeClock
from dualpath.laboratory.emulated.prefix import Seeds
from dualpath.laboratory.emulated.rank_plane import RankPlane
from dualpath.laboratory.emulated.verification import CheckedAt, Counts


class PassPart(NamedTuple):
    """A request's chunk in a pass; ``seeds`` of its prompt's blocks, up to the end of the chunk."""

    part: PromptPart
    seeds: Seeds


class PassWork(NamedTuple):
    """A pass to compute in ``compute_s``; ``wrong``: requests known to have wrong KV, and why."""

    parts: tuple[PassPart, ...]
    compute_s: float
    wrong: dict[str, str]


class PassFindings(NamedTuple):
    """A rank's report after a pass: requests whose KV it found wrong, and its comparisons."""

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
