"""vLLM's sampling parameters and logprobs as the token API carries them.

What the router's output processor does (detokenising, stop
strings, special tokens) is taken out of the parameters; everything
that shapes the tokens themselves goes through unchanged.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from dualpath.core.errors import BadRequestError
from dualpath.router.token_api.wire import (
    ChoiceLogprobs,
    Logprob,
    PromptLogprob,
    SampledLogprob,
)
from dualpath.vllm.request_job import KEPT_ARGUMENTS

#: Fields the router's own output processing has already dealt with, or that are vLLM-internal.
#: ``stream_interval`` is said to the decode engine apart: the router's own counts as well.
#: ``watermarking`` was resolved against a configuration without watermarks, so it says nothing.
ROUTER_SIDE_FIELDS = frozenset(
    {
        "stop",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "output_kind",
        "stream_interval",
        "flat_logprobs",
        "skip_clone",
        "output_text_buffer_length",
        "watermarking",
        "_eos_token_id",
        "_all_stop_token_ids",
        "_watermarking_skipped",
        "_bad_words_token_ids",
    }
)


def decode_sampling(
    params: SamplingParams,
    *,
    generated: int,
    max_tokens: int,
    max_logprobs: int,
    stream_interval: int = 1,
) -> dict[str, Any]:
    """Return the JSON form of ``params`` for a decode engine.

    ``generated`` tokens are part of its prompt already; ``max_tokens`` ≥ 1 more may follow.  The
    latter is always sent, since the server fills it in where a client leaves it out.  Prompt
    logprobs are the prefill engine's business.

    ``stream_interval`` is the router's own: where it, or the client's, lets tokens wait for each
    other at the router, they wait at the engine, and come as one event.  A stop string is then seen
    up to so many tokens late, by the engine alone.
    """
    fields = _fields(params)
    fields.pop("prompt_logprobs", None)
    fields.pop("skip_reading_prefix_cache", None)
    fields["max_tokens"] = max_tokens
    fields["min_tokens"] = max(params.min_tokens - generated, 0)
    if (interval := max(params.stream_interval or 1, stream_interval)) > 1:
        fields["stream_interval"] = interval
    _ask_logprobs(fields, max_logprobs)
    return fields


def prefill_sampling(
    params: SamplingParams, *, first_token: bool, max_logprobs: int
) -> dict[str, Any]:
    """Return the JSON form of ``params`` for a prefill engine: one token, kept or thrown away."""
    if not first_token:
        dropped: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1, "detokenize": False}
        if params.prompt_logprobs is not None:
            dropped["prompt_logprobs"] = params.prompt_logprobs
        return dropped
    fields = _fields(params)
    fields["max_tokens"] = 1
    fields["min_tokens"] = 0
    _ask_logprobs(fields, max_logprobs)
    return fields


def _fields(params: SamplingParams) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(params)
    kept = {name: value for name, value in fields.items() if name not in ROUTER_SIDE_FIELDS}
    if structured := kept.get("structured_outputs"):
        kept["structured_outputs"] = {
            name: value for name, value in structured.items() if not name.startswith("_")
        }
    extra = {
        name: value
        for name, value in (params.extra_args or {}).items()
        if name not in KEPT_ARGUMENTS
    }
    kept.pop("extra_args", None)
    if extra:
        kept["extra_args"] = extra
    for name in ("stop_token_ids", "bad_words"):
        if not kept.get(name):
            kept.pop(name, None)
    kept["detokenize"] = False
    kept["n"] = 1
    return kept


def _ask_logprobs(fields: dict[str, Any], max_logprobs: int) -> None:
    """Ask for one candidate more than the client did; ``max_logprobs`` -1: no limit.

    The wire cuts the list (sampled token first) to the number asked for, so that a sampled token
    outside the top n would push the n-th candidate out.
    """
    if fields.get("logprob_token_ids"):
        _ask_named_logprobs(fields, max_logprobs)
        return
    asked = fields.get("logprobs")
    if asked is not None and asked > 0 and (asked < max_logprobs or max_logprobs == -1):
        fields["logprobs"] = asked + 1


def _ask_named_logprobs(fields: dict[str, Any], max_logprobs: int) -> None:
    """Ask for named tokens' logprobs, and for as many candidates, without which none are sent.

    The first is named twice, which makes room for the sampled token as above.
    """
    named = fields["logprob_token_ids"]
    if max_logprobs != -1 and len(named) >= max_logprobs:
        raise BadRequestError(
            f"logprob_token_ids names {len(named)} tokens, at most {max_logprobs - 1} can be "
            "carried between router and engines; name fewer or raise --max-logprobs at both"
        )
    fields["logprob_token_ids"] = [*named, named[0]]
    fields["logprobs"] = len(named) + 1


def sampled_logprobs(wire: ChoiceLogprobs | None, params: SamplingParams) -> LogprobsLists | None:
    """Return vLLM's arrays for what ``params`` ask per sampled token, None if nothing.

    That is ``logprobs`` candidates (-1: all), or the tokens that ``logprob_token_ids`` name.
    """
    asked = params.num_logprobs
    if asked is None or wire is None or not wire.content:
        return None
    if params.logprob_token_ids:
        rows = [_named_row(position, params.logprob_token_ids) for position in wire.content]
    else:
        rows = [
            _row(position, {other.rank: other for other in position.top_logprobs}, asked)
            for position in wire.content
        ]
    width = min(len(row) for row in rows)
    return LogprobsLists(
        np.array([[entry.token_id for entry in row[:width]] for row in rows], dtype=np.int64),
        np.array([[entry.logprob for entry in row[:width]] for row in rows], dtype=np.float64),
        np.array([position.rank or 0 for position in wire.content], dtype=np.int64),
    )


def prompt_logprobs(
    wire: Sequence[dict[str, PromptLogprob] | None] | None, asked: int | None
) -> LogprobsTensors | None:
    """Return vLLM's tensors for all prompt positions but the first, which has none."""
    if asked is None or wire is None or len(wire) < 2:
        return None
    rows, ranks = [], []
    for position in wire[1:]:
        entries = [
            Logprob(int(token), entry.logprob, entry.rank)
            for token, entry in (position or {}).items()
        ]
        rows.append(_row(entries[0], {entry.rank: entry for entry in entries}, asked))
        ranks.append(entries[0].rank or 0)
    width = min(len(row) for row in rows)
    return LogprobsTensors(
        torch.tensor([[entry.token_id for entry in row[:width]] for row in rows]),
        torch.tensor(
            [[entry.logprob for entry in row[:width]] for row in rows], dtype=torch.float64
        ),
        torch.tensor(ranks),
    )


def _row(own: Logprob, by_rank: dict[int | None, Logprob], asked: int) -> list[Logprob]:
    """Return a row as vLLM's sampler makes it: the token itself, then the candidates by rank."""
    by_rank.setdefault(own.rank, own)
    row = [own]
    limit = len(by_rank) if asked == -1 else asked
    for rank in range(1, limit + 1):
        if rank not in by_rank:
            break
        row.append(by_rank[rank])
    return row


def _named_row(own: SampledLogprob, named: Sequence[int]) -> list[Logprob]:
    """Return a row as vLLM's sampler makes it: the token itself, then the named ones in order."""
    by_id: dict[int, Logprob] = {own.token_id: own}
    by_id.update((other.token_id, other) for other in own.top_logprobs)
    return [own, *(by_id[token_id] for token_id in named)]
