"""Settings and measurements of the profiler, which is in ``vllm.profiler``.

This module does not import vLLM, as the simulator's catalog and the help of ``dualpath profile``
need no engine.
"""

from typing import Annotated

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.core.settings import Setting, Settings
from dualpath.policy.batching import AttentionGeometry
from dualpath.vllm.front_end_settings import BlockTokens, Dtype, MaxModelLen, Model

# ------------------------------------------------------------------------------------- measurement
# Measurements of one engine by the profiler; the catalog fits a model's costs to them.


class PassTime(msgspec.Struct, frozen=True):
    """The time of a forward pass that computed ``bsz`` tokens after ``cached`` tokens."""

    cached: int
    bsz: int
    seconds: float


class StepTime(msgspec.Struct, frozen=True):
    """The time of a decode step of ``requests`` requests with mean context ``context_tokens``."""

    requests: int
    context_tokens: float
    seconds: float


class EngineFacts(msgspec.Struct, frozen=True):
    """Properties of the engine and its model.

    ``device`` and ``software`` only inform the reader of the file.
    """

    model: str
    layers: int
    kv_bytes_per_token: float
    context_limit_tokens: int
    attention: AttentionGeometry
    device: str
    software: str


class Measurement(msgspec.Struct, frozen=True):
    """All measurements of one profiling run."""

    facts: EngineFacts
    passes: tuple[PassTime, ...]
    steps: tuple[StepTime, ...]


# -------------------------------------------------------------------------------- profile settings
# Settings of a profiling run.

#: Limits above which more decode steps, repetitions or tokens add time but no information.
MAX_REPEATS = 1000
MAX_TOKENS = 10_000_000


class ProfileSettings(Settings, frozen=True, kw_only=True):
    """One engine and the grids of points at which it is timed.

    The prefill passes are ``cached_tokens`` × ``chunk_tokens``, the decode steps
    ``decode_requests`` × ``decode_context_tokens``.  Every pass runs once to warm up and ``repeat``
    times measured, every decode point ``decode_steps`` steps; the median is reported.
    """

    model: Model
    dtype: Dtype = "auto"
    block_tokens: BlockTokens = 64
    hbm_bytes: Annotated[
        int, Setting("KV memory of the engine; 0: all free memory that vLLM finds (GPU)", ge=0)
    ] = 512 << 20
    max_model_len: MaxModelLen = None
    enforce_eager: Annotated[bool, Setting("run eagerly instead of letting vLLM compile")] = True
    cached_tokens: Annotated[
        tuple[int, ...], Setting("tokens in cached blocks before a pass", ge=0, le=MAX_TOKENS)
    ] = (0, 512, 1536)
    chunk_tokens: Annotated[
        tuple[int, ...], Setting("tokens computed in a pass", ge=1, le=MAX_TOKENS)
    ] = (64, 192, 512)
    decode_requests: Annotated[
        tuple[int, ...], Setting("requests of a decode step", ge=1, le=MAX_TOKENS)
    ] = (1, 4, 8)
    decode_context_tokens: Annotated[
        tuple[int, ...], Setting("context of each request in tokens", ge=1, le=MAX_TOKENS)
    ] = (256, 1024)
    decode_steps: Annotated[
        int, Setting("decode steps measured at a point", ge=1, le=MAX_REPEATS)
    ] = 8
    repeat: Annotated[int, Setting("times a pass is measured", ge=1, le=MAX_REPEATS)] = 3
    seed: Annotated[int, Setting("seed of the random tokens", ge=0)] = 0

    def check(self) -> None:
        """Raise ``ConfigError`` for the first value out of range, before an engine starts."""
        super().check()
        for name in ("cached_tokens", "chunk_tokens", "decode_requests", "decode_context_tokens"):
            values: tuple[int, ...] = getattr(self, name)
            if len(set(values)) < 2:
                raise ConfigError(
                    f"{{{name}}} is {list(values)}; it needs at least two different values"
                )
        uneven = [tokens for tokens in self.cached_tokens if tokens % self.block_tokens]
        if uneven:
            raise ConfigError(
                f"{{cached_tokens}} {uneven[0]} is not a multiple of {self.block_tokens} tokens, "
                "the size of a block, but only whole blocks are cached; choose multiples"
            )

    @property
    def typical_round(self) -> tuple[int, int]:
        """Context and append in tokens of the round for which throughput is stated.

        The context is the largest of ``cached_tokens``, the append the median of ``chunk_tokens``.
        """
        return max(self.cached_tokens), sorted(self.chunk_tokens)[len(self.chunk_tokens) // 2]

    @property
    def prefill_tokens(self) -> int:
        """The longest context of a prefill pass in tokens, including the sampled token."""
        return max(self.cached_tokens) + max(self.chunk_tokens) + 1

    @property
    def decode_tokens(self) -> int:
        """The longest context of a decoding request in tokens.

        Requests that were prefilled first decode while the others are prefilled.
        """
        generated = max(self.decode_requests) + WARM_STEPS + self.decode_steps
        return max(self.decode_context_tokens) + generated + 1

    @property
    def longest_tokens(self) -> int:
        """The longest context of any point in tokens."""
        return max(self.prefill_tokens, self.decode_tokens)

    @property
    def blocks(self) -> int:
        """The largest number of KV blocks that either grid needs at once."""
        decode = max(self.decode_requests) * -(-self.decode_tokens // self.block_tokens)
        return max(decode, -(-self.prefill_tokens // self.block_tokens))

    @property
    def points(self) -> int:
        """The number of points of both grids."""
        prefill = len(self.cached_tokens) * len(self.chunk_tokens)
        return prefill + len(self.decode_requests) * len(self.decode_context_tokens)


#: Decode steps that run before the measured ones.
WARM_STEPS = 2
