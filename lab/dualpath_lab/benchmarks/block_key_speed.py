"""CPU milliseconds for the block keys of a prompt, which the router computes for each request.

Run:  ``python -m dualpath_lab.benchmarks.block_key_speed``.  Methods are interleaved, best of 30:
CBOR's encoder block by block, the former implementation; all tokens encoded in one call; and a
prompt with a cached prefix, the usual turn of an agent, which appends ``APPENDED_TOKENS``.
"""

import hashlib
import random
import time
from collections.abc import Callable

import cbor2

from dualpath.core.blocks import BlockKey, block_keys, chain_root
from dualpath.core.key_cache import KeyCache
from dualpath.report import markdown
from dualpath.report.model import Table

BLOCK_TOKENS = 64
PROMPT_TOKENS = 32_768
APPENDED_TOKENS = 429
VOCABULARY = 150_000
ROUNDS = 30


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


def main() -> None:
    """Measure and print a table."""
    prompt = random.Random(0).choices(range(VOCABULARY), k=PROMPT_TOKENS)
    before = prompt[:-APPENDED_TOKENS]
    assert encoded_one_by_one(prompt) == block_keys(prompt, BLOCK_TOKENS)

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
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):
        for name, measure in ways.items():
            best[name] = min(best[name], measure())
    rows = tuple((name, f"{ms:.2f}") for name, ms in best.items())
    print(markdown.table(Table("", ("keys of 32,768 tokens", "ms"), rows)))


if __name__ == "__main__":
    main()
