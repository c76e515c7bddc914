"""Settings of an emulated engine."""

import enum
import re
from typing import Annotated

import msgspec

from dualpath.core.addresses import host_and_port
from dualpath.core.blocks import BlockGeometry, StoreNamespace, slices_of
from dualpath.core.errors import ConfigError
from dualpath.core.settings import Setting, Settings
from dualpath.engine.settings import EngineSettings
from dualpath.node.certificates import CertFile, KeyFile
from dualpath.vllm.front_end_settings import BlockTokens, Host, MaxModelLen, Port
from dualpath_lab.emulated.words import VOCAB_SIZE
from dualpath_sim.catalog.load import CostsName, GpuName
from dualpath_sim.simulator.settings import ModelCosts

#: Identifies the byte layout of ``kv_bytes`` in the namespace of stored blocks.
LAYOUT = "emulated-1"
#: The KV of a token in a layer is a whole number of words of this size.
WORD_BYTES = 8
#: Full Blocks up to this size are compared byte by byte by default.
FULLY_VERIFIED_BLOCK_BYTES = 1 << 20


class Verify(enum.StrEnum):
    """How much of received KV is compared; the storage's own checksums are always verified."""

    FULL = "full"
    """Every byte."""
    SAMPLED = "sampled"
    """One word of every token in every layer, which identifies prefix and layer."""
    CHECKSUM = "checksum"
    """Only the checksums of blocks read from storage."""

    @staticmethod
    def fitting(geometry: BlockGeometry) -> "Verify":
        """Return full for small blocks and sampled for large ones."""
        small = geometry.full_block_bytes <= FULLY_VERIFIED_BLOCK_BYTES
        return Verify.FULL if small else Verify.SAMPLED


Layers = Annotated[int, Setting("layers of KV", ge=1)]
Speedup = Annotated[float, Setting("factor by which computation is faster", gt=0)]
BatchCap = Annotated[int, Setting("tokens of a pass in modes without compute quota", ge=1)]
_VERIFY = (
    "compare every byte of received KV, one word of every token and layer, or only checksums of "
    "storage"
)
VerifyChoice = Annotated[Verify, Setting(_VERIFY)]


class EmulatedServer(Settings, frozen=True, kw_only=True):
    """Settings of an emulated engine besides those of any engine."""

    host: Host = "127.0.0.1"
    port: Port = 0
    ssl_certfile: CertFile = ""
    ssl_keyfile: KeyFile = ""
    speedup: Speedup = 1.0
    hbm_bytes: Annotated[int, Setting("emulated HBM for KV", ge=1)] = 1 << 30
    batch_cap_tokens: BatchCap = 1024
    verify: Annotated[
        Verify | None, Setting(f"{_VERIFY}; none: full for blocks up to 1 MiB, else sampled")
    ] = None
    dp_size: Annotated[
        int, Setting("ranks of its data-parallel group, which end together; 1: no group", ge=1)
    ] = 1
    dp_rank: Annotated[int, Setting("rank in the data-parallel group, from 0", ge=0)] = 0
    dp_address: Annotated[
        str, Setting("address at which the first rank accepts the others", metavar="HOST:PORT")
    ] = ""
    dp_lock_step: Annotated[
        bool,
        Setting(
            "prefill ranks of the group compute their passes together, each as long as the slowest"
        ),
    ] = False
    tensor_parallel_size: Annotated[
        int, Setting("ranks of the engine, each a process with its slice of the KV", ge=1)
    ] = 1
    vocab_size: Annotated[
        int, Setting("size of the vocabulary; token ids have 32 bits", ge=2, le=1 << 32)
    ] = VOCAB_SIZE


class EmulatedOptions(EmulatedServer, frozen=True, kw_only=True):
    """Command-line options of an emulated engine, from which costs and geometry are derived."""

    model: CostsName = ""
    gpu: GpuName = "hopper"
    layers: Annotated[int | None, Setting("layers of KV; none: the model's", ge=1)] = None
    kv_bytes_per_token: Annotated[
        float | None,
        Setting("bytes over all layers, rounded to whole words per layer; none: the model's", gt=0),
    ] = None
    layer_parts: Annotated[
        str,
        Setting(
            "KV bytes of a token in each part of each layer, instead of layers and "
            "kv_bytes_per_token: "
            "`656+136*61` are 61 layers of two parts, `256,64@512*5` a large layer and five small "
            "ones that attend to the last 512 tokens",
            metavar="PARTS",
        ),
    ] = ""
    kv_heads: Annotated[
        int | None,
        Setting(
            "KV heads, which are divided among ranks; none: the model's, or 1 with layers, "
            "kv_bytes_per_token or layer_parts; 1 is latent KV, which every rank holds whole",
            ge=1,
        ),
    ] = None
    block_tokens: BlockTokens = 64
    max_model_len: MaxModelLen = None


class EmulatedSettings(EmulatedServer, frozen=True, kw_only=True):
    """All settings of an emulated engine; ``engine`` has those of any engine.

    ``costs`` determine the times of its computation.
    """

    engine: EngineSettings
    geometry: BlockGeometry
    costs: ModelCosts
    kv_heads: Annotated[int, Setting("KV heads, which are divided among ranks", ge=1)] = 1
    max_model_len: Annotated[
        int, Setting("longest context (prompt and answer) in tokens", ge=2)
    ] = 131072
    weights: Annotated[str, Setting("version of the weights; empty: those it was started with")] = (
        ""
    )

    def check(self) -> None:
        """Raise ``ConfigError`` (value, limit, remedy) for invalid settings."""
        super().check()
        if self.dp_rank >= self.dp_size or (self.dp_size > 1 and not _is_place(self.dp_address)):
            raise ConfigError(
                f"{{dp_rank}} is {self.dp_rank} of {self.dp_size}, {{dp_address}} is "
                f"{self.dp_address!r}; a rank must be below {{dp_size}}, and the address of a "
                "group must be HOST:PORT, or [ADDRESS]:PORT for IPv6"
            )
        if self.ssl_certfile and self.engine.api_url.startswith("http://"):
            raise ConfigError(
                f"{{ssl_certfile}} is {self.ssl_certfile!r} and {{api_url}} is "
                f"{self.engine.api_url!r}; write https:// there, or leave out one of them"
            )
        slices_of(self.tensor_parallel_size, self.kv_heads)
        if self.dp_lock_step and self.tensor_parallel_size > 1:
            raise ConfigError(
                f"{{tensor_parallel_size}} is {self.tensor_parallel_size} with {{dp_lock_step}}: "
                "emulated ranks of one device each can compute in lock step; leave one of them out"
            )
        if self.engine.share_loads:
            raise ConfigError(
                "{share_loads}: ranks of an emulated engine have no links between GPUs to exchange "
                "loaded KV; leave it out"
            )
        if self.batch_cap_tokens < self.geometry.block_tokens:
            raise ConfigError(
                f"{{batch_cap_tokens}} is {self.batch_cap_tokens}; it must be at least the block "
                f"size of {self.geometry.block_tokens} ({{block_tokens}}), since chunks end at "
                "block boundaries"
            )

    @property
    def namespace(self) -> StoreNamespace:
        """The namespace of stored blocks; engines with the same one share blocks."""
        return StoreNamespace(
            model=f"emulated-{self.costs.name}",
            dtype="words",
            layout=LAYOUT if self.kv_heads == 1 else f"{LAYOUT}-heads-{self.kv_heads}",
            geometry=self.geometry,
            mode="kv" if self.engine.mode.moves_bytes else "oracle",
            protection=self.engine.protection,
            weights=self.weights or msgspec.UNSET,
        )

    @property
    def layer_regions(self) -> int:
        """Number of layers of KV that HBM holds at a time."""
        return self.engine.layers_in_hbm(self.geometry.layers)


def block_geometry(
    layers: int, block_tokens: int, kv_bytes_per_token: float, kv_heads: int = 1
) -> BlockGeometry:
    """Return a geometry with about these KV bytes, in whole words per token, layer and head.

    Raises ``ConfigError`` for sizes that are not positive.
    """
    if layers < 1 or block_tokens < 1 or not kv_bytes_per_token > 0:
        raise ConfigError(
            f"there are {layers} layers, {block_tokens} tokens per block and "
            f"{kv_bytes_per_token:g} KV bytes per token; each must be above 0"
        )
    words = max(round(kv_bytes_per_token / layers / WORD_BYTES / kv_heads), 1) * kv_heads
    return BlockGeometry.uniform(layers, block_tokens, block_tokens * words * WORD_BYTES)


_LAYERS = re.compile(
    r"(?P<parts>[1-9]\d*(?:\+[1-9]\d*)*)(?:@(?P<window>[1-9]\d*))?(?:\*(?P<times>[1-9]\d*))?"
)
#: More layers than any model has; a larger number is a typing error.
_MOST_LAYERS = 1000


def part_geometry(layer_parts: str, block_tokens: int) -> BlockGeometry:
    """Return the geometry that ``EmulatedOptions.layer_parts`` describes.

    Raises ``ConfigError`` for invalid descriptions.
    """
    layers: list[tuple[int, ...]] = []
    windows: list[int] = []
    for text in layer_parts.split(","):
        found = _LAYERS.fullmatch(text.strip())
        times = int(found["times"] or 1) if found else 0
        if found is None or len(layers) + times > _MOST_LAYERS:
            raise ConfigError(
                f"{{layer_parts}} has {text.strip()!r}; write the bytes per token of a layer's "
                f"parts as A+B, N equal layers as A+B*N (at most {_MOST_LAYERS} layers), and a "
                "sliding window of W tokens as A+B@W*N"
            )
        parts = tuple(int(size) * block_tokens for size in found["parts"].split("+"))
        layers += [parts] * times
        windows += [int(found["window"] or 0)] * times
    return BlockGeometry(block_tokens, tuple(layers), tuple(windows) if any(windows) else ())


def _is_place(address: str) -> bool:
    try:
        return bool(host_and_port(address))
    except ValueError:
        return False
