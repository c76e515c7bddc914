"""A forward pass as every rank of an emulated prefill engine computes it."""

from typing import NamedTuple

from dualpath.engine.forward_pass import PromptPart, StreamedPass
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


class RankPasses:
    """Per layer a rank waits for stored KV, compares it, computes, writes its slice of new KV."""

    def __init__(self, plane: RankPlane) -> None:
        self._plane = plane
        self._clock = ComputeClock(plane.now_s, plane.threads.sleep)

    def run(self, work: PassWork) -> tuple[PassResult, list[PassFindings]]:
        """Run this rank's share; return what came of it here, and what each rank has found."""
        forward = self._plane.begin_pass([part.part for part in work.parts])
        layers = self._plane.geometry.layers
        layer_s = work.compute_s / layers
        wrong = dict(work.wrong)
        self._clock.begin()
        if self._plane.moves_bytes:
            for layer in range(layers):
                self._one_layer(work, forward, layer, layer_s, wrong)
        else:
            self._clock.work(layer_s * layers)
        failures = forward.finish(wrong)
        new = {name: found for name, found in wrong.items() if name not in work.wrong}
        findings = self._plane.group.gather(PassFindings(new, self._plane.verifier.news()))
        return PassResult(failures, wrong), findings

    def close(self) -> None:
        """Nothing is under way between passes."""

    def _one_layer(
        self,
        work: PassWork,
        forward: StreamedPass,
        layer: int,
        layer_s: float,
        wrong: dict[str, str],
    ) -> None:
        since_s = self._clock.now()
        forward.wait_loaded(layer)
        self._clock.waited(since_s)
        for part in work.parts:
            request_id = part.part.transfer.request_id
            if request_id not in wrong and not forward.failed(request_id):
                self._check_loaded(part, layer, wrong)
        self._clock.work(layer_s)
        for part in work.parts:
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
