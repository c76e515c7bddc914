"""A forward pass as every rank of an emulated prefill engine computes it."""

from collections.abc import Callable
from typing import NamedTuple

from dualpath.engine.follower import FollowedPass
from dualpath.engine.forward_pass import ForwardPass, PromptPart
from dualpath.laboratory.emulated.clock import ComputeClock
from dualpath.laboratory.emulated.prefix import Seeds
from dualpath.laboratory.emulated.rank_plane import RankPlane
from dualpath.laboratory.emulated.verification import CheckedAt, Counts


class PassPart(NamedTuple):
    """What is computed of a request; ``seeds`` of its prompt's blocks, up to the chunk's end."""

    part: PromptPart
    seeds: Seeds


class PassWork(NamedTuple):
    """A pass that computes for ``compute_s``; ``wrong`` are requests known to have wrong KV."""

    parts: tuple[PassPart, ...]
    compute_s: float
    wrong: dict[str, str]


class PassFindings(NamedTuple):
    """What a rank says after a pass: requests whose KV it has found wrong, and what it compared."""

    wrong: dict[str, str]
    counts: Counts


class PassResult(NamedTuple):
    """What came of a pass at all ranks: failed requests with reasons, and those with wrong KV."""

    failures: dict[str, str]
    wrong: dict[str, str]


#: In so many last layers of a pass the next one may begin: its first layers are loaded when the
#: last ones leave their regions, and what comes later is part of it, too.
LAYERS_AHEAD = 2


class RunningPass:
    """A pass that has begun at this rank; ``before`` may not be over, or None."""

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

    def is_known_bad(self, request_id: str) -> bool:
        """Whether nothing of a request is to be compared any more."""
        before = self._before
        return (
            request_id in self.wrong
            or self.forward.failed(request_id)
            or (before is not None and before.is_known_bad(request_id))
        )

    def finish(self) -> dict[str, str]:
        """Wait for the last transfers; return failed requests with reasons."""
        self._before = None
        return self.forward.finish(self.wrong)


class RankPasses:
    """Per layer a rank waits for stored KV, compares it, computes, writes its slice of new KV."""

    def __init__(self, plane: RankPlane) -> None:
        self._plane = plane
        self._clock = ComputeClock(plane.now_s, plane.threads.sleep)

    def run(self, work: PassWork) -> None:
        """Run this rank's share in a pass, for a rank that follows."""
        running = self.begin(work)
        self.compute(running)
        self.end(running)

    def begin(self, work: PassWork, before: RunningPass | None = None) -> RunningPass:
        """Start this rank's transfers of a pass, be the one ``before`` it over or not."""
        parts = [part.part for part in work.parts]
        forward = self._plane.begin_pass(parts, None if before is None else before.forward)
        return RunningPass(work, forward, before)

    def compute(
        self,
        running: RunningPass,
        late: Callable[[], None] = lambda: None,
        *,
        was_idle: bool = True,
    ) -> None:
        """Compute a pass; ``late`` is called as each of the last layers begins.

        ``was_idle``: nothing was computed when it began, so that the GPU has waited for that.
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
                late()
            if self._plane.moves_bytes:
                self._one_layer(running, layer, layer_s)
            else:
                self._clock.work(layer_s)

    def end(self, running: RunningPass) -> tuple[PassResult, list[PassFindings]]:
        """Wait for the last transfers; return what came of it here, and what each rank has found.

        Passes end in the order in which they began.
        """
        failures = running.finish()
        known = running.work.wrong
        new = {name: found for name, found in running.wrong.items() if name not in known}
        findings = self._plane.group.gather(PassFindings(new, self._plane.verifier.news()))
        return PassResult(failures, running.wrong), findings

    def close(self) -> None:
        """Nothing is under way between passes."""

    def _one_layer(self, running: RunningPass, layer: int, layer_s: float) -> None:
        forward, parts = running.forward, running.work.parts
        since_s = self._clock.now()
        forward.wait_loaded(layer)
        self._clock.waited(since_s)
        for part in parts:
            if not running.is_known_bad(part.part.transfer.request_id):
                self._check_loaded(part, layer, running.wrong)
        self._clock.work(layer_s)
        for part in parts:
            self._write_new(part, layer)
        since_s = self._clock.now()
        forward.computed(layer)
        self._clock.waited(since_s)

    def _check_loaded(self, part: PassPart, layer: int, wrong: dict[str, str]) -> None:
        computed, request_id = part.part, part.part.transfer.request_id
        found = self._plane.wrong_in_hbm(
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
