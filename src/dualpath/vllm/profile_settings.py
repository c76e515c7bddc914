"""What a profiling run measures; needs no vLLM."""

from typing import Annotated

from dualpath.core.errors import ConfigError
from dualpath.core.settings import Setting, Settings
from dualpath.vllm.front_end_settings import BlockTokens, Dtype, MaxModelLen, Model

#: Decode steps and repetitions beyond these add time and no knowledge.
MOST_REPEATS = 1000
MOST_TOKENS = 10_000_000


class ProfileSettings(Settings, frozen=True, kw_only=True):
    """One engine and the grids it is timed on.

    ``cached_tokens`` × ``chunk_tokens`` are the prefill passes; ``decode_requests`` ×
    ``decode_context_tokens`` the decode steps.  Every pass is run once unmeasured and ``repeat``
    times measured, every decode point over ``decode_steps`` steps; the median counts.
    """

    model: Model
    dtype: Dtype = "auto"
    block_tokens: BlockTokens = 64
    hbm_bytes: Annotated[
        int, Setting("KV memory of the engine, 0: what vLLM finds free (GPU)", ge=0)
    ] = 512 << 20
    max_model_len: MaxModelLen = None
    enforce_eager: Annotated[bool, Setting("run eagerly instead of letting vLLM compile")] = True
    cached_tokens: Annotated[
        tuple[int, ...], Setting("whole blocks cached before a pass", ge=0, le=MOST_TOKENS)
    ] = (0, 512, 1536)
    chunk_tokens: Annotated[
        tuple[int, ...], Setting("computed in a pass", ge=1, le=MOST_TOKENS)
    ] = (64, 192, 512)
    decode_requests: Annotated[
        tuple[int, ...], Setting("requests of a decode step", ge=1, le=MOST_TOKENS)
    ] = (1, 4, 8)
    decode_context_tokens: Annotated[
        tuple[int, ...], Setting("context of each of them", ge=1, le=MOST_TOKENS)
    ] = (256, 1024)
    decode_steps: Annotated[int, Setting("measured at a point", ge=1, le=MOST_REPEATS)] = 8
    repeat: Annotated[int, Setting("times a pass is measured", ge=1, le=MOST_REPEATS)] = 3
    seed: Annotated[int, Setting("of the random tokens", ge=0)] = 0
    typical_round_tokens: Annotated[
        tuple[int, ...],
        Setting(
            "round by which prefill_tokens_per_s (hence beta) is stated; none: the largest of "
            "cached and the middle of chunk tokens",
            ge=0,
            metavar="CONTEXT,APPEND",
        ),
    ] = ()

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
                f"{{cached_tokens}} {uneven[0]} is not a multiple of the block of "
                f"{self.block_tokens} tokens, and only whole blocks are cached; choose multiples"
            )
        if self.typical_round_tokens and (
            len(self.typical_round_tokens) != 2 or self.typical_round_tokens[1] < 1
        ):
            raise ConfigError(
                f"{{typical_round_tokens}} is {list(self.typical_round_tokens)}; it needs a "
                "context and an append of at least 1 token"
            )

    @property
    def typical_round(self) -> tuple[int, int]:
        """Context and append of the round by which throughput is stated."""
        if self.typical_round_tokens:
            return self.typical_round_tokens[0], self.typical_round_tokens[1]
        return max(self.cached_tokens), sorted(self.chunk_tokens)[len(self.chunk_tokens) // 2]

    @property
    def prefill_tokens(self) -> int:
        """The longest context of a prefill pass, with the token it samples."""
        return max(self.cached_tokens) + max(self.chunk_tokens) + 1

    @property
    def decode_tokens(self) -> int:
        """The longest context of a decoding request; some wait, decoding, for others' prefill."""
        generated = max(self.decode_requests) + WARM_STEPS + self.decode_steps
        return max(self.decode_context_tokens) + generated + 1

    @property
    def longest_tokens(self) -> int:
        """The longest context any point needs."""
        return max(self.prefill_tokens, self.decode_tokens)

    @property
    def blocks(self) -> int:
        """KV blocks the larger of both grids needs at once."""
        decode = max(self.decode_requests) * -(-self.decode_tokens // self.block_tokens)
        return max(decode, -(-self.prefill_tokens // self.block_tokens))

    @property
    def points(self) -> int:
        """Points of both grids."""
        prefill = len(self.cached_tokens) * len(self.chunk_tokens)
        return prefill + len(self.decode_requests) * len(self.decode_context_tokens)


#: Decode steps run unmeasured before the measured ones.
WARM_STEPS = 2
