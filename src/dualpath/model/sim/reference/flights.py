"""Assigned rounds: their engines, where their hits lie, and how many bytes that has them move."""

from dualpath.core.blocks import holding_blocks
from dualpath.core.cluster import Role
from dualpath.model.sim.carried import (
    LayerKinds,
    fill_bytes,
    load_bytes,
    read_bytes,
    send_bytes,
    whole_at_decode,
    whole_at_prefill,
)
from dualpath.model.sim.reference.prefill import Chunk
from dualpath.plan.counts import chunk_blocks
from dualpath.policy.events import Assignment


class Flight:
    """A round from its assignment on; ``parts_left`` of its reads are still to come.

    By side: ``kept_tokens`` its buffer was believed to keep, ``read_tokens`` it reads, which is
    more where the buffer had not kept them after all.
    """

    __slots__ = (
        *("_block_tokens", "_hit_tokens", "_kinds", "_prompt_tokens", "assignment", "de"),
        *("de_blocks", "kept_tokens", "parts_left", "pe", "pe_blocks", "pe_first", "read_tokens"),
    )

    def __init__(
        self,
        assignment: Assignment,
        hit_tokens: int,
        prompt_tokens: int,
        kinds: LayerKinds,
        block_tokens: int,
    ) -> None:
        self.assignment = assignment
        self.pe = int(assignment.prefill_engine)
        self.de = int(assignment.decode_engine)
        self._hit_tokens, self._prompt_tokens = hit_tokens, prompt_tokens
        self._kinds, self._block_tokens = kinds, block_tokens
        self.pe_first = self.pe_blocks = self.de_blocks = 0
        self.kept_tokens = dict.fromkeys(Role, 0)
        for run in assignment.reads:
            if run.cached:
                self.kept_tokens[run.side] += run.tokens(block_tokens, hit_tokens)
            if run.side is Role.DECODE:
                self.de_blocks += run.blocks.count
            else:
                # A run that is read follows one that is kept.
                self.pe_first = run.blocks.first if not self.pe_blocks else self.pe_first
                self.pe_blocks += run.blocks.count
        self.read_tokens = {
            Role.PREFILL: assignment.prefill_read_tokens,
            Role.DECODE: assignment.decode_read_tokens,
        }
        self.parts_left = 0

    @property
    def prompt_blocks(self) -> int:
        """Blocks of the whole prompt."""
        return holding_blocks(self._prompt_tokens, self._block_tokens)

    @property
    def _hit_blocks(self) -> int:
        return holding_blocks(self._hit_tokens, self._block_tokens)

    def engine(self, side: Role) -> int:
        """Return the engine of a side."""
        return self.pe if side is Role.PREFILL else self.de

    def _found_blocks(self, side: Role) -> int:
        """Blocks that a side's buffer had kept when it was granted: it reads the others."""
        blocks = self.pe_blocks if side is Role.PREFILL else self.de_blocks
        return blocks - holding_blocks(self.read_tokens[side], self._block_tokens)

    def read_bytes(self, side: Role) -> float:
        """Bytes that a side reads from storage."""
        return read_bytes(
            self._kinds,
            side is Role.DECODE,
            self._found_blocks(side),
            self.pe_first,
            self.pe_blocks,
            self._hit_blocks,
            self._block_tokens,
        )

    def load_bytes(self, chunk: Chunk, *, resident: bool) -> tuple[float, float, float]:
        """Bytes before a chunk: hits from the PE's buffer, from the DE's, and earlier chunks."""
        return load_bytes(
            self._kinds,
            chunk.cached // self._block_tokens,
            self.pe_first,
            self.pe_blocks,
            self._hit_blocks,
            self._block_tokens,
            resident,
        )

    def send_bytes(self, chunk: Chunk) -> float:
        """Bytes that go to the DE after a chunk."""
        return send_bytes(
            self._kinds,
            chunk_blocks(chunk.cached, chunk.bsz, self._block_tokens),
            chunk.cached // self._block_tokens,
            self.pe_first,
            self.pe_blocks,
            self._hit_blocks,
            self._prompt_tokens,
            self._block_tokens,
        )

    def fill_bytes(self) -> float:
        """Bytes that enter the DE's HBM."""
        return fill_bytes(self._kinds, self._prompt_tokens, self._block_tokens)

    def whole_at_prefill(self) -> int:
        """Blocks of the PE's run, its first, that its buffer may keep."""
        return whole_at_prefill(
            self._kinds,
            self._found_blocks(Role.PREFILL),
            self.pe_first,
            self.pe_blocks,
            self._hit_tokens,
            self._block_tokens,
        )

    def whole_at_decode(self) -> int:
        """Blocks of the prompt, its first, that the DE's buffer may keep."""
        return whole_at_decode(
            self._kinds,
            self._found_blocks(Role.DECODE),
            self.pe_first,
            self.pe_blocks,
            self._hit_tokens,
            self._prompt_tokens,
            self._block_tokens,
        )
