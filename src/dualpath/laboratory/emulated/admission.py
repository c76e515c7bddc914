"""Validates requests to an emulated engine and submits them to it."""

import functools
from collections.abc import Callable

from dualpath.core.cluster import Role
from dualpath.core.errors import BadRequestError
from dualpath.core.transfers import DecodeTransfer, PrefillTransfer
from dualpath.engine.transfer_checks import TransferChecks, with_own_hits
from dualpath.laboratory.emulated.data_plane import DataPlane
from dualpath.laboratory.emulated.decode import DecodeEngine
from dualpath.laboratory.emulated.prefill import PrefillEngine
from dualpath.laboratory.emulated.prefix import TokenPrefix
from dualpath.laboratory.emulated.requests import (
    DecodeRequest,
    Deliver,
    PrefillRequest,
    Sampling,
)
from dualpath.router.token_api.wire import GenerateRequest


class Admission:
    """Validates and submits requests of one engine; methods may be called from any thread."""

    def __init__(self, plane: DataPlane, engine: PrefillEngine | DecodeEngine) -> None:
        self._plane = plane
        self._engine = engine
        self._settings = plane.settings
        self._checks = TransferChecks(plane.settings.engine, plane.geometry)

    def transfer(self, request: GenerateRequest[Sampling]) -> PrefillTransfer | DecodeTransfer:
        """Return the request's transfer; raises ``BadRequestError`` for invalid requests."""
        transfer = self._checks.carried(request.kv_transfer_params)
        if transfer is None:
            raise BadRequestError(
                f"request {request.request_id} has no kv_transfer_params; send it through the "
                "router"
            )
        vocab_size = self._settings.vocab_size
        if (
            request.token_ids
            and not 0 <= min(request.token_ids) <= max(request.token_ids) < vocab_size
        ):
            raise BadRequestError(
                f"request {request.request_id} has token ids from {min(request.token_ids)} to "
                f"{max(request.token_ids)}, but the vocabulary has 0 to {vocab_size - 1}; correct "
                "them"
            )
        tokens, most = self._tokens(request), self._settings.max_model_len
        if max_tokens(request) < 1:
            raise BadRequestError(
                f"request {request.request_id}: max_tokens is {max_tokens(request)}; it must be at "
                "least 1"
            )
        if tokens > min(most, self._plane.manager.hbm_tokens):
            raise BadRequestError(
                f"request {request.request_id} needs {tokens} tokens, but the longest context is "
                f"{most} and the HBM holds {self._plane.manager.hbm_tokens}; shorten it or raise "
                "the engine's HBM"
            )
        self._checks.check(transfer, len(request.token_ids))
        return transfer

    def _tokens(self, request: GenerateRequest[Sampling]) -> int:
        """Return the number of tokens that need HBM at this engine."""
        if self._settings.engine.role is Role.PREFILL:
            return len(request.token_ids)
        return len(request.token_ids) + max_tokens(request)

    def prefix(
        self, request: GenerateRequest[Sampling], transfer: PrefillTransfer | DecodeTransfer
    ) -> TokenPrefix:
        """Return the prompt's keys and seeds, which takes long for a long prompt."""
        return TokenPrefix(
            request.token_ids[: transfer.prompt_tokens],
            self._settings.geometry.block_tokens,
            cache_salt=request.cache_salt,
            vocab_size=self._settings.vocab_size,
            capacity_tokens=self._tokens(request),
        )

    def submit(
        self,
        request: GenerateRequest[Sampling],
        transfer: PrefillTransfer | DecodeTransfer,
        prefix: TokenPrefix,
        deliver: Deliver,
    ) -> Callable[[], None]:
        """Submit the request to the engine; return a function that aborts it, even if it ended."""
        if isinstance(transfer, PrefillTransfer):
            assert isinstance(self._engine, PrefillEngine)
            prompt = PrefillRequest(prefix, with_own_hits(transfer, prefix.keys), deliver)
            self._engine.submit(prompt)
            return functools.partial(self._engine.abort, prompt)
        assert isinstance(self._engine, DecodeEngine)
        prior = tuple(request.token_ids[transfer.prompt_tokens :])
        decode = DecodeRequest(prefix, transfer, prior, max_tokens(request), deliver)
        self._engine.submit(decode)
        return functools.partial(self._engine.abort, decode)


def max_tokens(request: GenerateRequest[Sampling]) -> int:
    """Return how many tokens the request may generate."""
    return request.sampling_params.max_tokens
