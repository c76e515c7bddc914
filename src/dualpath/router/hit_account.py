"""How a prompt's tokens were obtained: loaded, or computed and why.

The longest possible hit is the ideal hit: every block with KV that was computed before.  The router
stores the keys of these blocks, which distinguishes blocks that storage has lost or the data path
has not delivered from new ones.
"""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from dualpath.core.blocks import BlockKey, max_hit_blocks
from dualpath.core.cluster import Role
from dualpath.core.recent import Recent
from dualpath.core.runs import HitRun

#: Tokens in blocks that no request has computed before.
NEW = "new"
#: The tokens behind the last block that can hit: at least one is always computed (§A.4).
TAIL = "tail"
#: Computed before, but not stored (any more, or not yet), nor in DRAM of the request's engines.
GONE = "gone"
NOT_CACHEABLE = "not-cacheable"
#: Computed before, but more than the request may load (``AttemptOrder.max_load_tokens``).
LIMITED = "load-limit"
#: Stored, but recomputed because that is faster (``policy.read_side``).
FASTER = "recompute"
#: Why no engine reported what is stored.
LOOKUP_FAILURES = (TIMEOUT, ENGINE_LOST) = ("timeout", "engine-lost")

#: Keys per generation of ``SeenBlocks``: with blocks of 64 tokens 16 million tokens.
SEEN_KEYS = 1 << 18


class HitPlace(StrEnum):
    """From where a hit was loaded, and by which engine of the request.

    Third DEs count as decode engines.  An engine that reads a block from storage may get it from
    the DRAM of its node.
    """

    PE_DRAM = "pe-dram"
    """The prefill engine's DRAM buffer, which had it from an earlier request."""
    DE_DRAM = "de-dram"
    PE_STORAGE = "pe-storage"
    """Storage, read by the prefill engine."""
    DE_STORAGE = "de-storage"


def hit_sources(hits: Sequence[HitRun], block_tokens: int) -> dict[HitPlace, int]:
    """Return the hit tokens by source; sources without any are left out."""
    tokens: dict[HitPlace, int] = {}
    for run in hits:
        if run.is_at(Role.PREFILL):
            source = HitPlace.PE_DRAM if run.cached else HitPlace.PE_STORAGE
        else:
            source = HitPlace.DE_DRAM if run.cached else HitPlace.DE_STORAGE
        tokens[source] = tokens.get(source, 0) + run.blocks.count * block_tokens
    return tokens


class HitAccount(msgspec.Struct, frozen=True):
    """Tokens of one prompt: ``hit_tokens`` were loaded, ``missed`` maps a reason to the others.

    ``sources`` are the hit tokens by ``HitPlace``, empty if no bytes are moved.

    ``ideal_hit_tokens`` would have been loaded by a storage that never evicts and a data path
    that never fails.
    """

    prompt_tokens: int
    hit_tokens: int
    ideal_hit_tokens: int
    missed: dict[str, int]
    sources: dict[HitPlace, int] = {}


class SeenBlocks:
    """Remembers the keys of blocks that were computed: the latest ``limit`` to twice as many.

    Hashes of keys stand for keys.  Blocks found in storage or DRAM are not noted again.
    """

    def __init__(self, limit: int = SEEN_KEYS) -> None:
        self._seen: Recent[int, None] = Recent(limit)

    def account(
        self,
        keys: Sequence[BlockKey],
        prompt_tokens: int,
        block_tokens: int,
        found_blocks: int,
        hit_blocks: int,
        *,
        unstored_reason: str = GONE,
        short_reason: str = "",
        faster_blocks: int = 0,
        hits: Sequence[HitRun] = (),
        most_blocks: int | None = None,
    ) -> HitAccount:
        """Divide a prompt of at least 1 token by reasons, then note its blocks as computed.

        ``found_blocks`` were found in storage or DRAM, of these ``hit_blocks`` loaded.
        ``unstored_reason`` is why blocks beyond them were not found.  ``faster_blocks`` at the end
        of those found were recomputed because that is faster; ``short_reason`` is why others were
        not loaded.  ``hits`` are the runs of the blocks that were loaded;
        beyond ``most_blocks`` nothing was to be loaded, None: without a bound.
        """
        usable_blocks = max_hit_blocks(prompt_tokens, block_tokens)
        ideal_blocks = found_blocks
        while ideal_blocks < usable_blocks and hash(keys[ideal_blocks]) in self._seen:
            ideal_blocks += 1
        self._seen.note(map(hash, keys[found_blocks:]), None)
        allowed_blocks = ideal_blocks
        if most_blocks is not None:
            allowed_blocks = max(min(ideal_blocks, most_blocks), found_blocks)
        missed: dict[str, int] = {}
        for reason, blocks in (
            (short_reason, found_blocks - faster_blocks - hit_blocks),
            (FASTER, faster_blocks),
            (unstored_reason, allowed_blocks - found_blocks),
            (LIMITED, ideal_blocks - allowed_blocks),
            (NEW, usable_blocks - ideal_blocks),
        ):
            if blocks > 0:
                missed[reason] = missed.get(reason, 0) + blocks * block_tokens
        missed[TAIL] = prompt_tokens - usable_blocks * block_tokens
        return HitAccount(
            prompt_tokens=prompt_tokens,
            hit_tokens=hit_blocks * block_tokens,
            ideal_hit_tokens=ideal_blocks * block_tokens,
            missed=missed,
            sources=hit_sources(hits, block_tokens),
        )
