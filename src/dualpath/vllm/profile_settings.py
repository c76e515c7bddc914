"""What a profiling run measures; needs no vLLM."""

import msgspec

from dualpath.core.errors import ConfigError

#: Decode steps and repetitions beyond these add time and no knowledge.
MOST_REPEATS = 1000
MOST_TOKENS = 10_000_000


class ProfileSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One engine and the grids it is timed on.

    ``cached_tokens`` × ``chunk_tokens`` are the prefill passes, cached ones whole blocks;
    ``decode_requests`` × ``decode_context_tokens`` the decode steps.  Every pass is run once
    unmeasured and ``repeats`` times measured, every decode point over ``decode_steps`` steps; the
    median counts.  ``hbm_bytes`` of KV memory, 0 lets vLLM take what it finds.
    ``max_model_len`` None is the model's own.
    """

    model: str
    dtype: str = "auto"
    block_tokens: int = 64
    hbm_bytes: int = 512 << 20
    max_model_len: int | None = None
    enforce_eager: bool = True
    cached_tokens: tuple[int, ...] = (0, 512, 1536)
    chunk_tokens: tuple[int, ...] = (64, 192, 512)
    decode_requests: tuple[int, ...] = (1, 4, 8)
    decode_context_tokens: tuple[int, ...] = (256, 1024)
    decode_steps: int = 8
    repeats: int = 3
    seed: int = 0

    def check(self) -> None:
        """Raise ``ConfigError`` for the first value out of range, before an engine starts."""
        for name, least in (
            ("cached_tokens", 0),
            ("chunk_tokens", 1),
            ("decode_requests", 1),
            ("decode_context_tokens", 1),
        ):
            values: tuple[int, ...] = getattr(self, name)
            if len(set(values)) < 2 or min(values) < least or max(values) > MOST_TOKENS:
                raise ConfigError(
                    f"{name} is {list(values)}; it needs at least two different values from "
                    f"{least} to {MOST_TOKENS}"
                )
        for name, most in (("decode_steps", MOST_REPEATS), ("repeats", MOST_REPEATS)):
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be 1 to {most}")
        if self.block_tokens < 1 or self.hbm_bytes < 0:
            raise ConfigError(
                f"block_tokens is {self.block_tokens} and hbm_bytes {self.hbm_bytes}; they must be "
                "at least 1 and 0"
            )
        uneven = [tokens for tokens in self.cached_tokens if tokens % self.block_tokens]
        if uneven:
            raise ConfigError(
                f"cached_tokens {uneven[0]} is not a multiple of the block of {self.block_tokens} "
                "tokens, and only whole blocks are cached; choose multiples"
            )

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
