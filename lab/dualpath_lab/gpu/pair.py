"""Phase `pair`: answers of 1P1D cold, from storage and continued; TPOT beside loads.

The engines measure their pass costs at start (`--profile auto`), as in a normal start.
"""

import asyncio
import statistics
from typing import Any

from dualpath.core.errors import DualPathError
from dualpath_lab.gpu.answers import (
    CONVERSATION,
    LARGE_GAP,
    PlainAnswer,
    compared,
    is_wrong,
    plain_answers,
)
from dualpath_lab.gpu.cluster import Client, Cluster, Served, prefill_rate
from dualpath_lab.gpu.model import prompts
from dualpath_lab.gpu.results import Check, read_result

#: Time for blocks of an answer to reach storage before the prompt is sent again.
_STORED_S = 1.0
#: Requests that load stored prompts beside a decoding request.
_LOADERS = 3
_REPEATS = 3


def pair(check: Check) -> None:
    """Compare the answers with those of phase `plain`, if it has run in the same folder.

    Raises ``RuntimeError`` at the end if a request failed, or if KV was wrong.
    """
    check.put("rehearsal", check.settings.rehearse)
    earlier = read_result(check.out, "plain")
    plain = plain_answers(earlier.found) if earlier else {}
    decoded = earlier.found.get("decode") if earlier else None
    plain_tpot_ms = decoded[0]["median_tpot_ms"] if decoded else None
    check.put("compared with plain", bool(plain))
    conversation = earlier.found.get(CONVERSATION, {}).get("prompt", []) if earlier else []
    with Cluster(check, "pair") as cluster:
        check.put("start_s", cluster.start_s)
        asyncio.run(_measure(check, cluster, plain, conversation, plain_tpot_ms))


async def _measure(
    check: Check,
    cluster: Cluster,
    plain: dict[str, PlainAnswer],
    conversation: list[int],
    plain_tpot_ms: float | None,
) -> None:
    sizes = check.settings.sizes
    async with cluster.client() as client:
        rows: list[dict[str, Any]] = []

        async def ask(name: str, prompt: list[int], turn: str) -> None:
            columns = _columns(await _answer(client, prompt, sizes.answer_tokens), plain.get(name))
            rows.append({"prompt": name, "prompt_tokens": len(prompt), "turn": turn, **columns})
            check.put("answers", rows)
            await asyncio.sleep(_STORED_S)

        asked = prompts(check.settings)
        for name, prompt in asked.items():
            for turn in ("continued",) if name.endswith("+") else ("cold", "stored"):
                await ask(name, prompt, turn)
        if conversation:
            await _answer(client, next(iter(asked.values())), sizes.turn_tokens)
            await asyncio.sleep(_STORED_S)
            await ask(CONVERSATION, conversation, "after its answer")
        check.put("prefill tokens/s", [_rates(cluster, rows)])
        check.put("decode", await _decode(check, client, plain_tpot_ms))
    failed = [row for row in rows if row.get("error")]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(rows)} requests failed: {failed[0]['error']}")
    if wrong := [f"{row['prompt']} {row['turn']}" for row in rows if is_wrong(row)]:
        raise RuntimeError(
            f"the answers to {', '.join(wrong)} part from the plain engine's where its two "
            f"likeliest tokens are more than {LARGE_GAP:g} nats apart: their KV is wrong"
        )


def _rates(cluster: Cluster, rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return the rate measured at start, and the best of the cold prompts.

    A measured rate far below the other was taken while kernels were compiled.
    """
    seen = [
        row["prompt_tokens"] / row["ttft_s"]
        for row in rows
        if row["turn"] == "cold" and row.get("ttft_s")
    ]
    return {"measured at start": prefill_rate(cluster.logs), "seen": max(seen, default=None)}


async def _answer(client: Client, prompt: list[int], count: int) -> Served | DualPathError:
    try:
        return await client.complete(prompt, count)
    except DualPathError as error:
        return error


def _columns(answer: Served | DualPathError, plain: PlainAnswer | None) -> dict[str, Any]:
    if isinstance(answer, DualPathError):
        return {"error": str(answer)[:300]}
    return {
        "ttft_s": answer.ttft_s,
        "plain_ttft_s": plain.ttft_s if plain else None,
        "cached_tokens": answer.cached_tokens,
        **compared(answer.tokens, plain),
    }


async def _decode(
    check: Check, client: Client, plain_tpot_ms: float | None
) -> list[dict[str, Any]]:
    """Return the time per token of a decoding request alone, and beside loads of stored KV."""
    stored = list(prompts(check.settings).values())
    count = check.settings.sizes.decode_tokens
    rows = []
    for beside, loaders in (("nothing", 0), ("loads", _LOADERS)):
        loading = [asyncio.create_task(_load(client, stored[-1])) for _ in range(loaders)]
        try:
            served = [await client.complete(stored[0], count) for _ in range(_REPEATS)]
        finally:
            for task in loading:
                task.cancel()
            ended = await asyncio.gather(*loading, return_exceptions=True)
        errors = [str(one) for one in ended if isinstance(one, DualPathError)]
        tpot_ms = [1e3 * one.tpot_s for one in served]
        rows.append(
            {
                "beside": beside,
                "tokens": count,
                "median_tpot_ms": statistics.median(tpot_ms),
                "max_tpot_ms": max(tpot_ms),
                "plain_tpot_ms": plain_tpot_ms,
                "error": errors[0] if errors else "",
            }
        )
    return rows


async def _load(client: Client, prompt: list[int]) -> None:
    """Send a stored prompt again and again."""
    while True:
        await client.complete(prompt, 1)
