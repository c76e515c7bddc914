"""CPU milliseconds for the block keys of a prompt, which the router computes for each request.

Methods are interleaved, best of 30: CBOR's encoder block by block, the former implementation; all
tokens encoded in one call; and a prompt with a cached prefix, the usual turn of an agent, which
appends ``APPENDED_TOKENS``.
"""

import hashlib
import random
import time
from collections.abc import Callable
from typing import Annotated, Any

import cbor2

from dualpath.core.blocks import BlockKey, block_keys, chain_root
from dualpath.core.key_cache import KeyCache
from dualpath.core.settings import Setting, Settings
from dualpath_sim.harness.experiment import Experiment, Progress, Stage, one_stage
from dualpath_sim.harness.numbers import Column, Numbers, numbers_page

BLOCK_TOKENS = 64
PROMPT_TOKENS = 32_768
APPENDED_TOKENS = 429
VOCABULARY = 150_000


class BlockKeySettings(Settings, frozen=True, kw_only=True):
    """Rounds of all methods."""

    repeat: Annotated[int, Setting("rounds, of which the best counts", ge=1)] = 30
    seed: Annotated[int, Setting("of the token ids", ge=0)] = 0


def encoded_one_by_one(token_ids: list[int]) -> list[BlockKey]:
    """Return the keys, computed literally by their definition."""
    keys, parent = [], chain_root()
    for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        link = (parent, tuple(token_ids[start : start + BLOCK_TOKENS]), None)
        parent = hashlib.sha256(cbor2.dumps(link, canonical=True)).digest()
        keys.append(parent)
    return keys


def cpu_ms(call: Callable[[], object]) -> float:
    """Return the CPU time of a call."""
    start_ns = time.process_time_ns()
    call()
    return (time.process_time_ns() - start_ns) / 1e6


def _stages(settings: BlockKeySettings, progress: Progress) -> list[Stage[Any, Numbers]]:
    prompt = random.Random(settings.seed).choices(range(VOCABULARY), k=PROMPT_TOKENS)
    before = prompt[:-APPENDED_TOKENS]

    def next_turn() -> float:
        memory = KeyCache(BLOCK_TOKENS)
        memory.keys(before)
        return cpu_ms(lambda: memory.keys(prompt))

    ways: dict[str, Callable[[], float]] = {
        "tokens encoded one by one": lambda: cpu_ms(lambda: encoded_one_by_one(prompt)),
        "all tokens encoded in one call": lambda: cpu_ms(lambda: block_keys(prompt, BLOCK_TOKENS)),
        "in one call, cached for the next turn": lambda: cpu_ms(
            lambda: KeyCache(BLOCK_TOKENS).keys(prompt)
        ),
        "next turn, with a cached prefix": next_turn,
    }
    return one_stage(ways, lambda measure, number: {"cpu_ms": measure()})


BLOCK_KEYS = Experiment(
    name="block-keys",
    title="Block keys of a prompt of 32,768 tokens",
    settings=BlockKeySettings(),
    result=Numbers,
    stages=_stages,
    draw=numbers_page(
        "CPU time, best of all rounds", [Column("ms", "cpu_ms", of=min, tolerance=0.15)]
    ),
)
