"""Full Blocks, Layer Blocks and their chained keys (paper §4.1, §A.5).

A *Layer Block* holds the KV-cache of ``block_tokens`` tokens in one layer; a *Full Block* is
the concatenation of the Layer Blocks of all layers, in layer order, so that no layout conversion
is ever needed: a Layer Block is a slice of a Full Block.

A Layer Block consists of *parts*, one for each KV tensor that a layer has (latent KV and the keys
of an indexer, for example); most layers have one.  A Full Block has all heads of the whole model,
head-major, independent of an engine's tensor parallelism: a rank that moves only some heads moves a
*slice* of each part (``core.parts``).

A block's *key* is a chained hash: SHA-256 over the canonical CBOR of (parent key, the block's token
ids, extra keys), the same function as vLLM's ``sha256_cbor``.  Equal keys therefore mean equal
token prefixes, and router, engines and storage compute the same keys without communication.
"""

import enum
import hashlib
from array import array
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Annotated, NamedTuple

import cbor2
import msgspec
import numpy as np

from dualpath.core.errors import ConfigError
from dualpath.core.weights import WeightsVersion

# -------------------------------------------------------------------------------------- key extras
# The extra keys of blocks: everything besides the tokens that changes their KV.
#
# The same values in the same order as in vLLM 0.32 (``v1/core/kv_cache_utils.py``,
# ``generate_block_hash_extra_keys``): those of every block, then the images that touch a block,
# then, in the first block, the salt.


class PromptItem(msgspec.Struct, frozen=True):
    """An image, or another item, in place of ``tokens`` ≥ 1 tokens from ``first_token`` on.

    ``identifier`` names its content: equal identifiers after equal prefixes mean equal KV.
    """

    identifier: str
    first_token: int
    tokens: int

    @property
    def end_token(self) -> int:
        """The token after its last one."""
        return self.first_token + self.tokens

    def blocks(self, block_tokens: int) -> range:
        """Return the blocks that it overlaps."""
        return range(self.first_token // block_tokens, -(-self.end_token // block_tokens))


class KeyExtras(msgspec.Struct, frozen=True):
    """The extra keys of one prompt's blocks and of its continuation.

    ``every`` are those of each block (such as the adapter), ``items`` do not overlap and are in the
    order of their tokens, ``cache_salt`` enters the first block and, through the chain, all.
    """

    every: tuple[object, ...] = ()
    cache_salt: str | None = None
    items: tuple[PromptItem, ...] = ()

    def encoded(self, first_block: int, blocks: int, block_tokens: int) -> list[bytes]:
        """Return the canonical CBOR of the extra keys of ``blocks`` blocks from ``first_block``."""
        common = cbor2.dumps(self.every or None, canonical=True)
        found = [common] * blocks
        for block, own in self._own(first_block, first_block + blocks, block_tokens).items():
            found[block - first_block] = cbor2.dumps((*self.every, *own), canonical=True)
        return found

    def _own(self, begin: int, end: int, block_tokens: int) -> dict[int, list[object]]:
        """Return the extra keys of single blocks of ``[begin, end)``, without ``every``."""
        own: dict[int, list[object]] = {}
        for item in self.items:
            touched = item.blocks(block_tokens)
            for block in range(max(touched.start, begin), min(touched.stop, end)):
                offset = item.first_token - block * block_tokens
                own.setdefault(block, []).append(("mm", item.identifier, offset))
        if self.cache_salt and begin == 0 < end:
            own.setdefault(0, []).append(("cache_salt", self.cache_salt))
        return own


# ---------------------------------------------------------------------------------- token encoding
# Token ids as canonical CBOR, block by block: the input of the hash of a block's key.
#
# The encoder of ``cbor2`` takes 0.2 µs per token, which dominated the time of hashing a prompt on
# the router's event loop.  Here all tokens are encoded at once with numpy.

#: Fewer tokens are encoded faster by ``cbor2``.
_FEW_TOKENS = 96


def token_array(token_ids: Sequence[int]) -> Sequence[int]:
    """Return token ids as an array of 32-bit numbers, or as they are if one of them has no 32 bits.

    The conversion of a long list takes a third of the time that its keys take, that of an array
    nearly none.
    """
    try:
        return array("I", token_ids)
    except OverflowError:
        return token_ids


def are_tokens(token_ids: Sequence[int], vocab_size: int) -> bool:
    """Return whether all numbers are from 0 to ``vocab_size`` - 1."""
    numbers = token_array(token_ids)
    if isinstance(numbers, array) and len(numbers):
        return bool(np.frombuffer(numbers, np.uint32).max() < vocab_size)
    return all(0 <= token < vocab_size for token in numbers)


def encoded_blocks(token_ids: Sequence[int], block_tokens: int) -> list[bytes]:
    """Return each full block's tokens as a CBOR array; trailing tokens are left out.

    Ids are any integers; those below 2**32 are fast.
    """
    whole = len(token_ids) // block_tokens * block_tokens
    if whole < _FEW_TOKENS:
        return _one_by_one(token_ids, whole, block_tokens)
    try:
        ids = np.frombuffer(array("I", token_ids[:whole]), np.uint32)
    except OverflowError:
        return _one_by_one(token_ids, whole, block_tokens)
    head = cbor2.dumps([0] * block_tokens)[:-block_tokens]
    # An id below 24 is one byte; others are a byte that encodes how many bytes follow (1, 2 or 4,
    # big-endian) and these.
    above_1, above_2, above_4 = ids >= 24, ids >= 1 << 8, ids >= 1 << 16
    items = np.empty((whole, 5), np.uint8)
    items[:, 0] = np.where(above_1, np.uint8(0x18) + above_2 + above_4, ids)
    items[:, 1:] = ids.astype(">u4").view(np.uint8).reshape(whole, 4)
    used = np.empty((whole, 5), np.bool_)
    for column, rule in enumerate((True, above_4, above_4, above_2, above_1)):
        used[:, column] = rule
    encoded = np.compress(used.reshape(-1), items.reshape(-1)).tobytes()
    lengths = np.count_nonzero(used.reshape(-1, 5 * block_tokens), axis=1)
    ends = np.cumsum(lengths).tolist()
    return [head + encoded[at:end] for at, end in zip([0, *ends], ends, strict=False)]


def _one_by_one(token_ids: Sequence[int], whole: int, block_tokens: int) -> list[bytes]:
    return [
        cbor2.dumps(tuple(token_ids[at : at + block_tokens]), canonical=True)
        for at in range(0, whole, block_tokens)
    ]


#: Seed of the chain, vLLM's ``DEFAULT_NONE_HASH_SEED`` (``v1/core/kv_cache_utils.py``).
CHAIN_SEED = "vllm-none-hash"

BlockKey = bytes
"""32 bytes; names one Full Block by the whole token prefix that ends with it."""


def holding_blocks(tokens: int, block_tokens: int) -> int:
    """Blocks that hold ``tokens`` tokens, the last one possibly partial."""
    return -(-tokens // block_tokens)


def max_hit_blocks(prompt_tokens: int, block_tokens: int) -> int:
    """Maximum hit blocks of a prompt: at least its last token has to be computed (§A.4)."""
    return max(prompt_tokens - 1, 0) // block_tokens


def first_seen_block(tokens: int, window_tokens: int, block_tokens: int) -> int:
    """Return the first block that the token after ``tokens`` others attends to.

    Later tokens attend to no earlier block.  A token attends to itself and ``window_tokens`` - 1
    tokens before it; with a window of 0 to all.
    """
    if window_tokens == 0:
        return 0
    return max(tokens - window_tokens + 1, 0) // block_tokens


class LayerPart(NamedTuple):
    """Part ``part`` of layer ``layer``: ``size_bytes`` of a Full Block from ``offset_bytes`` on."""

    layer: int
    part: int
    offset_bytes: int
    size_bytes: int


class BlockGeometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """Shape of the blocks of one model.

    ``block_tokens`` ≥ 1 tokens per block (64 in the paper); ``layer_parts``: for each layer the
    bytes ≥ 1 of its parts, opaque: engines may pack K and V as they like.  ``layer_windows``: for
    each layer the tokens of its sliding window, 0 for full attention; empty if all layers have full
    attention.  Raises ``ValueError`` (msgspec's, when decoded) for blocks without tokens, layers or
    bytes, and for windows that do not match the layers.
    """

    block_tokens: int
    layer_parts: tuple[tuple[int, ...], ...]
    layer_windows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Validate; see the class."""
        if self.block_tokens < 1 or not self.layer_parts:
            raise ValueError(
                f"blocks of {self.block_tokens} tokens in {len(self.layer_parts)} layers; each "
                "must be at least 1"
            )
        for layer, sizes in enumerate(self.layer_parts):
            if not sizes or min(sizes) < 1:
                raise ValueError(
                    f"layer {layer} has parts of {list(sizes)} bytes; it needs at least one, each "
                    "of at least 1 byte"
                )
        windows = self.layer_windows
        misfit = len(windows) != len(self.layer_parts) or min(windows) < 0 or not any(windows)
        if windows and misfit:
            raise ValueError(
                f"windows of {list(windows)} tokens for {len(self.layer_parts)} layers; each layer "
                "needs one, 0 where it attends to all, or there are none at all"
            )

    @classmethod
    def uniform(cls, layers: int, block_tokens: int, layer_block_bytes: int) -> "BlockGeometry":
        """Return blocks of ``layers`` equal layers of one part each."""
        return cls(block_tokens, ((layer_block_bytes,),) * layers)

    @property
    def layers(self) -> int:
        """Number of layers with KV."""
        return len(self.layer_parts)

    def is_window_layer(self, layer: int) -> bool:
        """Whether a layer has a sliding window."""
        return bool(self.layer_windows) and self.layer_windows[layer] > 0

    def seen_from(self, layer: int, tokens: int) -> int:
        """Return the first block that a layer reads for the token after ``tokens`` others.

        Blocks before it are outside the layer's window, and no kernel reads them.
        """
        window = self.layer_windows[layer] if self.layer_windows else 0
        return first_seen_block(tokens, window, self.block_tokens)

    def whole_from(self, hit_blocks: int) -> int:
        """Return the first block of a hit of ``hit_blocks`` blocks that needs its window layers.

        0 for a model without window layers: all blocks need all layers.
        """
        hit_tokens = hit_blocks * self.block_tokens
        return first_seen_block(hit_tokens, max(self.layer_windows, default=0), self.block_tokens)

    @cached_property
    def parts(self) -> tuple[LayerPart, ...]:
        """All parts, in their order within a Full Block."""
        found, offset_bytes = [], 0
        for layer, sizes in enumerate(self.layer_parts):
            for part, size_bytes in enumerate(sizes):
                found.append(LayerPart(layer, part, offset_bytes, size_bytes))
                offset_bytes += size_bytes
        return tuple(found)

    @cached_property
    def full_block_bytes(self) -> int:
        """Bytes of one Full Block: all layers of ``block_tokens`` tokens."""
        return sum(sum(sizes) for sizes in self.layer_parts)

    @cached_property
    def windowless_bytes(self) -> int:
        """Bytes of one Full Block without its window layers."""
        layers = (n for n in range(self.layers) if not self.is_window_layer(n))
        return sum(map(self.bytes_of, layers))

    def bytes_of(self, layer: int | None, *, whole: bool = True) -> int:
        """Bytes of a block in one layer, or (None) in all; not ``whole``: without window layers."""
        if layer is not None:
            return sum(self.layer_parts[layer])
        return self.full_block_bytes if whole else self.windowless_bytes

    def slice_of(self, layer: int) -> slice:
        """Return the slice of a Full Block that is the Layer Block of a layer."""
        before = sum(map(sum, self.layer_parts[:layer]))
        return slice(before, before + self.bytes_of(layer))

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token over all layers, rounded down."""
        return self.full_block_bytes // self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens, the last one possibly partial."""
        return holding_blocks(tokens, self.block_tokens)

    def max_hit_blocks(self, prompt_tokens: int) -> int:
        """Maximum hit blocks of a prompt."""
        return max_hit_blocks(prompt_tokens, self.block_tokens)


class Protection(enum.StrEnum):
    """Protection of stored blocks against anyone without the storage key."""

    AUTHENTICATED = "authenticated"
    """Blocks cannot be forged, but anyone with access to the storage can read them."""
    ENCRYPTED = "encrypted"
    """Blocks can neither be forged nor read."""


class StoreNamespace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that must be equal for two engines to exchange stored blocks.

    ``mode`` separates the length-only blocks of Oracle runs (§7.2) from real ones;
    ``protection``, absent for plain blocks, separates blocks by how they are protected;
    ``weights`` is the version of weights that were changed after the start, absent for those that
    ``model`` identifies.
    """

    model: str
    dtype: str
    layout: str
    geometry: BlockGeometry
    mode: str = "kv"
    # Unset is not encoded, so that the digest of other namespaces is that of earlier versions.
    protection: Protection | msgspec.UnsetType = msgspec.UNSET
    weights: WeightsVersion | msgspec.UnsetType = msgspec.UNSET

    def digest(self) -> str:
        """16 hex digits that name this namespace on disk and on the wire."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:16]

    def with_weights(
        self, weights: WeightsVersion | msgspec.UnsetType = msgspec.UNSET
    ) -> "StoreNamespace":
        """Return the namespace of the same engines with other weights; keys stay the same."""
        return msgspec.structs.replace(self, weights=weights)


#: A ``tenant_tag`` on the wire, empty without one.
TenantTag = Annotated[str, msgspec.Meta(pattern=r"\A(?:[0-9a-f]{16})?\Z")]


class BlockOrigin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parent and tenant of a run of blocks of one chain, stored for eviction and quotas.

    ``parent`` is the key before the first block, ``chain_root()`` for a first block of a prompt,
    empty if unknown.  ``tenant`` is a ``tenant_tag``, empty without a tenant or if unknown.
    """

    parent: BlockKey = b""
    tenant: TenantTag = ""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for values that do not fit into a block's header."""
        if len(self.parent) not in (0, 32) or len(self.tenant) not in (0, 16):
            raise ValueError(
                f"parent of {len(self.parent)} bytes and tenant of {len(self.tenant)} characters: "
                "32 and 16 are needed, or none"
            )


#: The origin of a block with an unknown parent and tenant.
UNKNOWN_ORIGIN = BlockOrigin()


def tenant_tag(cache_salt: str | None) -> str:
    """Return 16 hex digits that identify a salt's tenant in quotas; empty without a salt."""
    if not cache_salt:
        return ""
    return hashlib.sha256(cbor2.dumps(["dualpath-tenant", cache_salt])).hexdigest()[:16]


@cache
def chain_root() -> BlockKey:
    """Return the parent of every first block."""
    return hashlib.sha256(cbor2.dumps(CHAIN_SEED, canonical=True)).digest()


def block_keys(
    token_ids: Sequence[int],
    block_tokens: int,
    *,
    cache_salt: str | None = None,
    extra_keys: tuple[object, ...] = (),
) -> list[BlockKey]:
    """Return the chained keys of the full blocks of ``token_ids``, first block first.

    Equal to vLLM's ``request.block_hashes`` under ``--prefix-caching-hash-algo sha256_cbor``.
    ``extra_keys`` enter every block (such as a LoRA name), ``cache_salt`` the first one and,
    through the chain, all.  Trailing tokens that do not fill a block have no key.
    """
    extras = KeyExtras(every=extra_keys, cache_salt=cache_salt)
    return chained_keys(chain_root(), token_ids, block_tokens, extras)


def chained_keys(
    parent: BlockKey,
    token_ids: Sequence[int],
    block_tokens: int,
    extras: KeyExtras,
    first_block: int = 0,
) -> list[BlockKey]:
    """Continue a chain after ``parent``, the key of the block before ``first_block``."""
    keys: list[BlockKey] = []
    blocks = encoded_blocks(token_ids, block_tokens)
    beside = extras.encoded(first_block, len(blocks), block_tokens)
    for tokens, extra in zip(blocks, beside, strict=True):
        # CBOR of (parent, tokens, extra): an array of three, the first of them 32 bytes.
        parent = hashlib.sha256(b"".join((b"\x83\x58\x20", parent, tokens, extra))).digest()
        keys.append(parent)
    return keys


# ------------------------------------------------------------------------------------------- parts
# Slices of parts: the share of every Full Block that one engine, or one of its ranks, moves.
#
# Parts are head-major, so the heads of a rank are one contiguous slice of a part.  The slice is a
# property of the rank and not of the block: engines of different tensor-parallel sizes share
# buffers and storage.


class PartSlice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Slice ``index`` of a part cut into ``count`` equal ones, 0 ≤ index < count."""

    index: int = 0
    count: int = 1

    def of(self, part: LayerPart) -> LayerPart:
        """Return the bytes of the slice; raises ``ConfigError`` if there are no equal slices."""
        if not 0 <= self.index < self.count:
            raise ConfigError(
                f"slice {self.index} of {self.count}; slices are counted from 0 to {self.count - 1}"
            )
        size_bytes, rest = divmod(part.size_bytes, self.count)
        if rest or not size_bytes:
            raise ConfigError(
                f"part {part.part} of layer {part.layer} has {part.size_bytes} bytes, which "
                f"{self.count} ranks cannot share evenly; use a number of ranks that divides the "
                "KV heads"
            )
        return part._replace(
            offset_bytes=part.offset_bytes + self.index * size_bytes, size_bytes=size_bytes
        )


#: The slice of an engine of one device: whole parts.
WHOLE = PartSlice()


def slices_of(ranks: int, heads: int) -> int:
    """Return into how many slices ``ranks`` of an engine divide each part of ``heads`` KV heads.

    With fewer heads than ranks several ranks hold the same slice, as in vLLM; latent KV counts as
    one head.  Raises ``ConfigError`` if neither number divides the other.
    """
    slices = min(ranks, heads)
    if ranks % slices or heads % slices:
        raise ConfigError(
            f"{ranks} ranks for {heads} KV heads; one number must divide the other, correct "
            "--tensor-parallel-size"
        )
    return slices
