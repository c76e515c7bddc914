"""Converts vLLM's requests to the router's ``Job`` and refuses unsupported ones.

The prefill engine samples the first token unless sampling depends on state that exists on one
engine only: a grammar, a seeded generator, counts of generated tokens.  In that case the decode
engine samples the first token too, at the cost of recomputing one prompt token.
"""

from collections.abc import Sequence

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.outputs import LogprobsTensors

from dualpath.core.adapters import Adapter
from dualpath.core.blocks import tenant_tag
from dualpath.core.errors import BadRequestError
from dualpath.core.key_extras import KeyExtras
from dualpath.core.key_memory import KeyCache
from dualpath.core.session_hints import HINT_ARGUMENTS, session_hints
from dualpath.router.control.served_adapters import ServedAdapters
from dualpath.router.engine_calls import Job
from dualpath.router.requests.prompt_limits import check_salt
from dualpath.vllm.prompt_images import ImageInput

#: Entries of ``extra_args`` that are not sent to engines: those reserved for the connectors, which
#: a client must not set, and those for the router.
TRANSFER_ARGUMENTS = frozenset({"kv_transfer_params", "ec_transfer_params"})
ROUTER_ARGUMENTS = TRANSFER_ARGUMENTS | HINT_ARGUMENTS

NO_ADAPTERS = ServedAdapters({})


class ClientRequest:
    """The payload of a ``Job``: vLLM's request, and its prompt logprobs if requested.

    ``prompt_logprobs`` are set by the prefill call (again after a retry) and read once, when the
    first token is sent to the client.
    """

    def __init__(
        self,
        request: EngineCoreRequest,
        adapter: Adapter | None = None,
        images: tuple[ImageInput, ...] = (),
    ) -> None:
        self.request = request
        self.adapter = adapter
        self.images = images
        self.prompt_logprobs: LogprobsTensors | None = None

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters as vLLM's front end resolved them."""
        params = self.request.sampling_params
        assert params is not None
        return params

    @property
    def engine_salt(self) -> str | None:
        """The salt for the engines' block hashes, which includes an adapter's digest."""
        salt = self.request.cache_salt
        return self.adapter.salt(salt) if self.adapter else salt

    def extras(self) -> KeyExtras:
        """Return what this request's block keys depend on besides tokens."""
        salt = self.request.cache_salt
        items = tuple(image.item for image in self.images)
        if self.adapter:
            return self.adapter.extras(salt, items)
        return KeyExtras(cache_salt=salt, items=items)


def make_job(
    request: EngineCoreRequest,
    memory: KeyCache,
    stateful_sampling: bool,
    adapters: ServedAdapters = NO_ADAPTERS,
    images: tuple[ImageInput, ...] = (),
) -> Job:
    """Return the router's job for ``request``; ``memory`` caches block keys of earlier prompts.

    ``stateful_sampling``: the engines run custom logits processors, which may depend on generated
    tokens.  ``images`` are the request's ``image_inputs``.  Raises ``BadRequestError`` for
    unsupported requests, and ``DualPathError`` for an adapter that no engine has registered yet.
    """
    _refuse_unsupported(request)
    params = request.sampling_params
    prompt = request.prompt_token_ids
    assert params is not None
    assert prompt is not None
    assert params.max_tokens is not None
    check_salt(request.cache_salt)
    lora = request.lora_request
    adapter = adapters.adapter(lora.lora_name, lora.lora_path) if lora else None
    client = ClientRequest(request, adapter, images)
    extras = client.extras()

    keys = tuple(memory.keys(prompt, extras))

    def keys_for(token_ids: Sequence[int]) -> Sequence[bytes]:
        return memory.continued(keys, token_ids, extras)

    return Job(
        request_id=request.request_id,
        prompt_token_ids=tuple(prompt),
        max_new_tokens=params.max_tokens,
        keys=keys,
        keys_for=keys_for,
        cacheable=params.prompt_logprobs is None,
        first_token_from_pe=not stateful_sampling and is_stateless(params),
        payload=client,
        trace_headers=request.trace_headers,
        tenant=tenant_tag(request.cache_salt),
        hints=session_hints(params.extra_args or {}, request.session_id),
    )


def is_stateless(params: SamplingParams) -> bool:
    """Whether the choice of a token depends only on the tokens before it.

    ``min_tokens`` is state only for the first token: see ``can_continue``.
    """
    return params.min_tokens == 0 and can_continue(params)


def can_continue(params: SamplingParams) -> bool:
    """Whether another engine can continue after generated tokens as if they were prompt tokens.

    False if sampling has state that generated tokens in a prompt do not restore: the position in a
    grammar, a seeded generator, counts of tokens.
    """
    custom_arguments = set(params.extra_args or {}) - ROUTER_ARGUMENTS
    return not (
        params.structured_outputs is not None
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.repetition_penalty != 1.0
        or params.seed is not None
        or params.bad_words
        or params.thinking_token_budget is not None
        or params.repetition_detection is not None
        or params.trace_decode_token_ids
        or custom_arguments
    )


def _refuse_unsupported(request: EngineCoreRequest) -> None:
    params = request.sampling_params
    if params is None:
        raise BadRequestError("pooling requests are not supported; use an engine's own server")
    options = {
        "prompt embeddings": request.prompt_embeds is not None,
        "streaming inputs": request.resumable,
        "prompt_logprob_token_ids": isinstance(params.prompt_logprob_token_ids, np.ndarray | list),
    }
    refused = [name for name, present in options.items() if present]
    if refused:
        raise BadRequestError(
            f"{' and '.join(refused)}: not supported with separate prefill and decode engines; "
            "send token or text prompts without these options"
        )
