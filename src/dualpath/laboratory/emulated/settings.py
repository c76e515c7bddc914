"""Settings of one emulated engine and of its front door."""

import msgspec

from dualpath.core.blocks import BlockGeometry, StoreNamespace
from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.engine.settings import EngineSettings
from dualpath.laboratory.emulated.kv_bytes import WORD_BYTES
from dualpath.laboratory.emulated.verification import Verify
from dualpath.model.sim.settings import ModelCosts

#: Names the bytes of ``kv_bytes``: engines that fill blocks otherwise must not share storage.
LAYOUT = "emulated-1"


class EmulatedSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an emulated engine is told; ``engine`` is what any engine is told.

    ``host`` and ``port`` of its HTTP server, port 0 takes any free one.  ``costs`` price its
    computation, which runs ``speedup`` times as fast.  ``hbm_bytes`` of KV memory.
    ``batch_cap_tokens`` bounds a forward pass in modes without compute quota.  ``verify`` None
    chooses by block size.  Tokens lie between 0 and ``vocab_size``; prompt and answer have at
    most ``max_model_len`` tokens.
    """

    engine: EngineSettings
    geometry: BlockGeometry
    costs: ModelCosts
    host: str = "127.0.0.1"
    port: int = 0
    speedup: float = 1.0
    hbm_bytes: int = 1 << 30
    batch_cap_tokens: int = 1024
    verify: Verify | None = None
    vocab_size: int = 32000
    max_model_len: int = 131072

    def checked(self) -> "EmulatedSettings":
        """Return self; raises ``ConfigError`` (value, limit, remedy) for what cannot work."""
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be between 0 and 65535")
        if not self.speedup > 0:
            raise ConfigError(f"speedup is {self.speedup}; it must be above 0")
        if self.batch_cap_tokens < self.geometry.block_tokens:
            raise ConfigError(
                f"batch_cap_tokens is {self.batch_cap_tokens}; it must be at least the block size "
                f"of {self.geometry.block_tokens}, since chunks end with a block"
            )
        for name, least in (("vocab_size", 2), ("max_model_len", 2), ("hbm_bytes", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.vocab_size > 1 << 32:
            raise ConfigError(f"vocab_size is {self.vocab_size}; token ids have 32 bits")
        return self

    @property
    def namespace(self) -> StoreNamespace:
        """Who may share blocks with this engine."""
        return StoreNamespace(
            model=f"emulated-{self.costs.name}",
            dtype="words",
            layout=LAYOUT,
            geometry=self.geometry,
            mode="kv" if self.engine.mode.moves_bytes else "oracle",
        )

    @property
    def layer_regions(self) -> int:
        """Layers of KV that HBM holds at a time: all but at a PE with layerwise prefill."""
        layers, engine = self.geometry.layers, self.engine
        if engine.role is Role.DECODE or not engine.mode.layerwise:
            return layers
        return min(engine.layer_buffers, layers) or layers


class EmulatedOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a user says of an emulated engine; costs and geometry are worked out from it.

    ``model`` a catalog model or a file of measured costs, ``gpu`` whose rates a catalog model has;
    ``layers`` and ``kv_bytes_per_token`` (over all layers) None for the model's;
    ``max_model_len`` tokens, None for the model's context.  The rest is ``EmulatedSettings``'.
    """

    model: str = ""
    gpu: str = "hopper"
    layers: int | None = None
    kv_bytes_per_token: float | None = None
    block_tokens: int = 64
    host: str = "127.0.0.1"
    port: int = 0
    speedup: float = 1.0
    hbm_bytes: int = 1 << 30
    batch_cap_tokens: int = 1024
    verify: Verify | None = None
    vocab_size: int = 32000
    max_model_len: int | None = None


def block_geometry(layers: int, block_tokens: int, kv_bytes_per_token: float) -> BlockGeometry:
    """Return blocks of KV of about that size, a whole number of words per token and layer.

    Raises ``ConfigError`` for sizes that are no sizes.
    """
    if layers < 1 or block_tokens < 1 or not kv_bytes_per_token > 0:
        raise ConfigError(
            f"{layers} layers of blocks of {block_tokens} tokens with {kv_bytes_per_token:g} bytes "
            "per token; each of the three must be above 0"
        )
    words = max(round(kv_bytes_per_token / layers / WORD_BYTES), 1)
    return BlockGeometry(
        layers=layers,
        block_tokens=block_tokens,
        layer_block_bytes=block_tokens * words * WORD_BYTES,
    )
