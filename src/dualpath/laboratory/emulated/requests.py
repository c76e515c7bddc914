"""A request at an emulated engine: what was asked, what is owed, how it answers."""

from collections.abc import Callable

import msgspec

from dualpath.core.transfers import DecodeTransfer, PrefillTransfer
from dualpath.laboratory.emulated.prefix import TokenPrefix


class Sampling(msgspec.Struct):
    """Sampling parameters of the token API; an emulated token depends on the prefix alone.

    A stream's first token comes at once, the others ``stream_interval`` ≥ 1 at a time, as vLLM's.
    """

    max_tokens: int = 16
    stream_interval: int = 1


class Answer:
    """Tokens or the end of a request, on their way to its HTTP handler.

    ``error`` says that the request failed for good; ``finish_reason`` "error" without it says that
    another engine may try.
    """

    __slots__ = ("error", "finish_reason", "token_ids")

    def __init__(
        self,
        token_ids: tuple[int, ...] = (),
        finish_reason: str | None = None,
        error: str | None = None,
    ) -> None:
        self.token_ids = token_ids
        self.finish_reason = finish_reason
        self.error = error


Deliver = Callable[[Answer], None]


class PrefillRequest:
    """A prompt at a PE; the engine's thread owns it once it was submitted."""

    def __init__(
        self, prefix: TokenPrefix, prefill_transfer: PrefillTransfer, deliver: Deliver
    ) -> None:
        self.prefix = prefix
        self.prefill_transfer = prefill_transfer
        self.deliver = deliver
        #: Of its prompt, those that are stored or have been given to a pass.
        self.done_tokens = 0
        #: Passes under way that compute a part of it.
        self.passes = 0
        self.failure: str | None = None
        self.wrong: str | None = None
        self.hbm_blocks: tuple[int, ...] = ()
        self.aborted = False


class DecodeRequest:
    """A prompt at a DE whose KV waits in its buffer.

    ``prior_tokens`` follow the prompt already; ``max_tokens`` more are to be generated.  All
    tokens before ``computed_tokens`` have KV.
    """

    def __init__(
        self,
        prefix: TokenPrefix,
        decode_transfer: DecodeTransfer,
        prior_tokens: tuple[int, ...],
        max_tokens: int,
        deliver: Deliver,
    ) -> None:
        self.prefix = prefix
        self.decode_transfer = decode_transfer
        self.prior_tokens = prior_tokens
        self.left_tokens = max_tokens
        self.deliver = deliver
        # A prompt without a following token computes its last one again to get it.
        self.computed_tokens = decode_transfer.prompt_tokens - (0 if prior_tokens else 1)
        self.room_tokens = decode_transfer.prompt_tokens + len(prior_tokens) + max_tokens
        self.hbm_blocks: tuple[int, ...] = ()
        self.aborted = False
