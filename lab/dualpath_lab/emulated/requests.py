"""Requests at an emulated engine: their parameters, state and answers."""

from collections.abc import Callable

import msgspec

from dualpath.core.transfers import DecodeTransfer, PrefillTransfer
from dualpath_lab.emulated.checkable_kv import TokenPrefix


class Sampling(msgspec.Struct):
    """Sampling parameters of the token API; an emulated token depends only on the prefix.

    In a stream the first token is sent at once, the others ``stream_interval`` ≥ 1 at a time, as in
    vLLM.
    """

    max_tokens: int = 16
    stream_interval: int = 1


class Answer:
    """Tokens or the end of a request, for its HTTP handler.

    With ``error`` the request has failed permanently; with ``finish_reason`` "error" and no
    ``error`` another engine may retry it.
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
    """A prompt at a PE; the engine's threads own it after it was submitted."""

    def __init__(
        self, prefix: TokenPrefix, prefill_transfer: PrefillTransfer, deliver: Deliver
    ) -> None:
        self.prefix = prefix
        self.prefill_transfer = prefill_transfer
        self.deliver = deliver
        #: Prompt tokens that are hits or were scheduled in a pass.
        self.done_tokens = 0
        #: Running passes that compute a chunk of it.
        self.passes = 0
        self.failure: str | None = None
        self.wrong: str | None = None
        self.hbm_blocks: tuple[int, ...] = ()
        self.aborted = False


class DecodeRequest:
    """A prompt at a DE with its KV in the DE's buffer.

    ``prior_tokens`` were generated after the prompt by another engine; up to ``max_tokens`` more
    are generated here.  The first ``computed_tokens`` tokens have KV.
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
        self.remaining_tokens = max_tokens
        self.deliver = deliver
        # Without a prior token the last prompt token is recomputed to sample the first one.
        self.computed_tokens = decode_transfer.prompt_tokens - (0 if prior_tokens else 1)
        self.capacity_tokens = decode_transfer.prompt_tokens + len(prior_tokens) + max_tokens
        self.hbm_blocks: tuple[int, ...] = ()
        self.aborted = False
