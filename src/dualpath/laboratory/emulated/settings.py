"""Settings of one emulated engine and of its front door."""

import enum
import re
from typing import Annotated, Literal

from dualpath.core.blocks import BlockGeometry, StoreNamespace
from dualpath.core.errors import ConfigError
from dualpath.core.parts import slices_of
from dualpath.core.settings import Setting, Settings
from dualpath.engine.settings import EngineSettings
from dualpath.model.sim.settings import ModelCosts
from dualpath.vllm.front_end_settings import BlockTokens, Host, MaxModelLen, Port

#: Names the bytes of ``kv_bytes``: engines that fill blocks otherwise must not share storage.
LAYOUT = "emulated-1"
#: KV of a token in a layer is a whole number of these.
WORD_BYTES = 8
#: Up to this size of a Full Block every byte is compared unless asked otherwise.
FULLY_VERIFIED_BLOCK_BYTES = 1 << 20


class Verify(enum.StrEnum):
    """How much of arriving KV is compared; the storage's own checksums are always on."""

    FULL = "full"
    """Every byte."""
    SAMPLED = "sampled"
    """One word of every token in every layer, which shows prefix and layer."""
    CHECKSUM = "checksum"
    """Nothing beyond the checksums of blocks read from storage."""

    @staticmethod
    def fitting(geometry: BlockGeometry) -> "Verify":
        """Return full for small blocks and sampled for large ones."""
        small = geometry.full_block_bytes <= FULLY_VERIFIED_BLOCK_BYTES
        return Verify.FULL if small else Verify.SAMPLED


CostsName = Annotated[
    str,
    Setting(
        "catalog model, folder with a config.json, or measured costs of `dualpath profile`; its "
        "forward passes take these times",
        metavar="NAME|FOLDER|COSTS.toml",
    ),
]
GpuName = Annotated[str, Setting("rates for a catalog model", metavar="NAME")]
Layers = Annotated[int, Setting("layers of KV", ge=1)]
Speedup = Annotated[float, Setting("computes that much faster", gt=0)]
BatchCap = Annotated[int, Setting("tokens of a pass in modes without compute quota", ge=1)]
_VERIFY = (
    "compares every byte of arriving KV, a word of every token and layer, or only storage checksums"
)
VerifyChoice = Annotated[Verify, Setting(_VERIFY)]


class EmulatedServer(Settings, frozen=True, kw_only=True):
    """What an emulated engine has beside the settings of any engine."""

    host: Host = "127.0.0.1"
    port: Port = 0
    speedup: Speedup = 1.0
    hbm_bytes: Annotated[int, Setting("emulated HBM for KV", ge=1)] = 1 << 30
    batch_cap_tokens: BatchCap = 1024
    verify: Annotated[
        Verify | None, Setting(f"{_VERIFY}; none: every byte of blocks up to 1 MiB")
    ] = None
    dp_size: Annotated[
        int, Setting("ranks of its data-parallel group, which end together; 1: none", ge=1)
    ] = 1
    dp_rank: Annotated[int, Setting("its rank, from 0 on", ge=0)] = 0
    dp_address: Annotated[
        str, Setting("where the first rank meets the others", metavar="HOST:PORT")
    ] = ""
    tensor_parallel_size: Annotated[
        int, Setting("ranks of the engine, each a process with its slice of the KV", ge=1)
    ] = 1
    transport: Annotated[
        Literal["nixl", "memory"],
        Setting(
            "how KV gets from engine to engine: NIXL, or by the kernel between processes of one "
            "machine, which needs nothing installed; the same for all engines"
        ),
    ] = "nixl"
    vocab_size: Annotated[
        int, Setting("token ids lie between 0 and it; they have 32 bits", ge=2, le=1 << 32)
    ] = 32000


class EmulatedOptions(EmulatedServer, frozen=True, kw_only=True):
    """What a user says of an emulated engine; costs and geometry are worked out from it."""

    model: CostsName = ""
    gpu: GpuName = "hopper"
    layers: Annotated[int | None, Setting("layers of KV; none: the model's", ge=1)] = None
    kv_bytes_per_token: Annotated[
        float | None,
        Setting("over all layers, rounded to whole words per layer; none: the model's", gt=0),
    ] = None
    layer_parts: Annotated[
        str,
        Setting(
            "KV bytes of a token in each part of each layer, instead of the two above: "
            "`656+136*61` are 61 layers of two parts, `256,64@512*5` a large layer and five small "
            "ones that attend to the last 512 tokens",
            metavar="PARTS",
        ),
    ] = ""
    kv_heads: Annotated[
        int | None,
        Setting(
            "KV heads, which ranks share out; none: the model's, but 1 where one of the three "
            "above is given; 1 is latent KV, whole at every rank",
            ge=1,
        ),
    ] = None
    block_tokens: BlockTokens = 64
    max_model_len: MaxModelLen = None


class EmulatedSettings(EmulatedServer, frozen=True, kw_only=True):
    """What an emulated engine is made of; ``engine`` holds the settings of any engine.

    ``costs`` price its computation.
    """

    engine: EngineSettings
    geometry: BlockGeometry
    costs: ModelCosts
    kv_heads: Annotated[int, Setting("KV heads, which ranks share out", ge=1)] = 1
    max_model_len: Annotated[int, Setting("most tokens of prompt and answer", ge=2)] = 131072

    def check(self) -> None:
        """Raise ``ConfigError`` (value, limit, remedy) for what cannot work."""
        super().check()
        if self.dp_rank >= self.dp_size or (self.dp_size > 1 and ":" not in self.dp_address):
            raise ConfigError(
                f"{{dp_rank}} is {self.dp_rank} of {self.dp_size}, {{dp_address}} "
                f"{self.dp_address!r}; a rank lies below {{dp_size}}, and the address of a group "
                "is HOST:PORT"
            )
        slices_of(self.tensor_parallel_size, self.kv_heads)
        if self.engine.share_loads:
            raise ConfigError(
                "{share_loads}: ranks of an emulated engine have no links between GPUs to gather "
                "what others load; leave it out"
            )
        if self.batch_cap_tokens < self.geometry.block_tokens:
            raise ConfigError(
                f"{{batch_cap_tokens}} is {self.batch_cap_tokens}; it must be at least the block "
                f"size of {self.geometry.block_tokens} ({{block_tokens}}), since chunks end with a "
                "block"
            )

    @property
    def namespace(self) -> StoreNamespace:
        """Who may share blocks with this engine."""
        return StoreNamespace(
            model=f"emulated-{self.costs.name}",
            dtype="words",
            layout=LAYOUT if self.kv_heads == 1 else f"{LAYOUT}-heads-{self.kv_heads}",
            geometry=self.geometry,
            mode="kv" if self.engine.mode.moves_bytes else "oracle",
            protection=self.engine.protection,
        )

    @property
    def layer_regions(self) -> int:
        """Layers of KV that HBM holds at a time."""
        return self.engine.layers_in_hbm(self.geometry.layers)


def block_geometry(
    layers: int, block_tokens: int, kv_bytes_per_token: float, kv_heads: int = 1
) -> BlockGeometry:
    """Return blocks of KV of about that size, a whole number of words per token, layer and head.

    Raises ``ConfigError`` for sizes that are no sizes.
    """
    if layers < 1 or block_tokens < 1 or not kv_bytes_per_token > 0:
        raise ConfigError(
            f"{layers} layers of blocks of {block_tokens} tokens with {kv_bytes_per_token:g} bytes "
            "per token; each of the three must be above 0"
        )
    words = max(round(kv_bytes_per_token / layers / WORD_BYTES / kv_heads), 1) * kv_heads
    return BlockGeometry.uniform(layers, block_tokens, block_tokens * words * WORD_BYTES)


_LAYERS = re.compile(
    r"(?P<parts>[1-9]\d*(?:\+[1-9]\d*)*)(?:@(?P<window>[1-9]\d*))?(?:\*(?P<times>[1-9]\d*))?"
)
#: More than any model has; more layers than this are a slip.
_MOST_LAYERS = 1000


def part_geometry(layer_parts: str, block_tokens: int) -> BlockGeometry:
    """Return blocks of the layers that ``EmulatedOptions.layer_parts`` describes.

    Raises ``ConfigError`` for what is no such description.
    """
    layers: list[tuple[int, ...]] = []
    windows: list[int] = []
    for text in layer_parts.split(","):
        found = _LAYERS.fullmatch(text.strip())
        times = int(found["times"] or 1) if found else 0
        if found is None or len(layers) + times > _MOST_LAYERS:
            raise ConfigError(
                f"{{layer_parts}} has {text.strip()!r}; layers are parts of so many bytes per "
                f"token, A+B, or N layers alike, A+B*N, {_MOST_LAYERS} at most, with a sliding "
                "window of W tokens A+B@W*N"
            )
        parts = tuple(int(size) * block_tokens for size in found["parts"].split("+"))
        layers += [parts] * times
        windows += [int(found["window"] or 0)] * times
    return BlockGeometry(block_tokens, tuple(layers), tuple(windows) if any(windows) else ())
