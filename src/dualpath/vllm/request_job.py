"""From vLLM's request to the router's ``Job``: what is refused, and what has to stay together.

The first token comes from the prefill engine unless sampling it depends on state that only one
engine can keep: a grammar, a seeded generator, counts of generated tokens.  Then the decode
engine samples from the first token on, at the price of computing one prompt token again.
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
from dualpath.core.key_memory import KeyMemory
from dualpath.core.session_hints import HINT_ARGUMENTS, session_hints
from dualpath.router.control.served_adapters import ServedAdapters
from dualpath.router.engine_calls import Job
from dualpath.router.requests.prompt_limits import check_salt
from dualpath.vllm.prompt_images import SentImage

#: Entries of ``extra_args`` that belong to the engines' connectors, never to a client, and those
#: that are the router's: neither goes on to an engine.
TRANSFER_ARGUMENTS = frozenset({"kv_transfer_params", "ec_transfer_params"})
KEPT_ARGUMENTS = TRANSFER_ARGUMENTS | HINT_ARGUMENTS

NO_ADAPTERS = ServedAdapters({})


class ClientRequest:
    """Rides on a ``Job`` as payload: vLLM's request, and its prompt's logprobs if asked for.

    ``prompt_logprobs`` are written by the prefill call (again after a retry) and read once, when
    the first token is handed to the client.
    """

    def __init__(
        self,
        request: EngineCoreRequest,
        adapter: Adapter | None = None,
        images: tuple[SentImage, ...] = (),
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
    def engines_salt(self) -> str | None:
        """The salt that engines hash: an adapter's digest is in it."""
        salt = self.request.cache_salt
        return self.adapter.salt(salt) if self.adapter else salt

    def extras(self) -> KeyExtras:
        """Return what enters the keys of this request beside tokens."""
        salt = self.request.cache_salt
        items = tuple(image.item for image in self.images)
        if self.adapter:
            return self.adapter.extras(salt, items)
        return KeyExtras(cache_salt=salt, items=items)


def make_job(
    request: EngineCoreRequest,
    memory: KeyMemory,
    stateful_sampling: bool,
    adapters: ServedAdapters = NO_ADAPTERS,
    images: tuple[SentImage, ...] = (),
) -> Job:
    """Return the router's job for ``request``, its keys from ``memory`` as far as it has them.

    ``stateful_sampling`` says that the engines run custom logits processors, which may look at
    generated tokens.  Raises ``BadRequestError`` for what the data path cannot carry, and
    ``DualPathError`` for an adapter that no engine has registered yet.  ``images`` are the
    request's ``sent_images``.
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
    """Whether a token's choice depends on nothing but the tokens before it.

    A minimum of tokens counts as state only for the first token: see ``can_continue``.
    """
    return params.min_tokens == 0 and can_continue(params)


def can_continue(params: SamplingParams) -> bool:
    """Whether another engine can go on after generated tokens as if they had been prompt.

    False where sampling keeps state over generated tokens that a prompt does not restore: a
    grammar's position, a seeded generator, counts.
    """
    custom_arguments = set(params.extra_args or {}) - KEPT_ARGUMENTS
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
        raise BadRequestError("pooling requests are not served here; use the engine's own server")
    asked = {
        "prompt embeddings": request.prompt_embeds is not None,
        "streaming inputs": request.resumable,
        "prompt_logprob_token_ids": isinstance(params.prompt_logprob_token_ids, np.ndarray | list),
    }
    refused = [name for name, present in asked.items() if present]
    if refused:
        raise BadRequestError(
            f"{' and '.join(refused)}: not supported over split prefill and decode engines; send "
            "token or text prompts, without these options"
        )
