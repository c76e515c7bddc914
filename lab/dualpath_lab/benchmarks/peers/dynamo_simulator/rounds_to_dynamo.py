"""Converts a trace of [append, generated] rounds to a trace for Dynamo's replay.

Run in dualpath's environment: ``python rounds_to_dynamo.py TRACE OUTPUT [--cumulative]``.

The rows are Mooncake's: one per turn, a hash id per block of tokens, ``delay`` in milliseconds
after the session's previous turn.  By default a row contains the appended tokens, and Dynamo
prepends the earlier prompts and its generated tokens (``mooncake-delta``), as in a round (§A.3).
Dynamo supports this format only with aggregated workers; with ``--cumulative`` a row contains the
whole prompt (``mooncake``), and its generated part has other ids then.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path

from dualpath.core.errors import TraceError
from dualpath.core.request import Round
from dualpath.workload.conversation.token_session import TokenSession
from dualpath.workload.formats import read_trace

#: Tokens per hash id.  Whole prompts use blocks eight times as large to limit the file's size;
#: Dynamo splits both into its own blocks and finds the same hits.
DELTA_BLOCK_TOKENS = 64
CUMULATIVE_BLOCK_TOKENS = 512

Row = dict[str, object]


def delta_rows(session_id: str, rounds: Sequence[Round], ids: Iterator[int]) -> Iterator[Row]:
    """Yield one row per round with its appended tokens; Dynamo requires at least one."""
    for index, recorded in enumerate(rounds):
        tokens = max(recorded.append_tokens, 1)
        blocks = [next(ids) for _ in range(-(-tokens // DELTA_BLOCK_TOKENS))]
        yield _row(session_id, index, recorded, tokens, blocks)


def cumulative_rows(session_id: str, rounds: Sequence[Round], ids: Iterator[int]) -> Iterator[Row]:
    """Yield one row per round with the whole prompt."""
    blocks: list[int] = []
    context_tokens = 0
    for index, recorded in enumerate(rounds):
        tokens = context_tokens + max(recorded.append_tokens, 1)
        while len(blocks) * CUMULATIVE_BLOCK_TOKENS < tokens:
            blocks.append(next(ids))
        yield _row(session_id, index, recorded, tokens, blocks)
        context_tokens = tokens + recorded.generated_tokens


def _row(session_id: str, index: int, recorded: Round, tokens: int, blocks: list[int]) -> Row:
    start = {"timestamp": 0.0} if index == 0 else {"delay": recorded.delay_s * 1000}
    return {
        "session_id": session_id,
        "input_length": tokens,
        "output_length": recorded.generated_tokens,
        "hash_ids": list(blocks),
        **start,
    }


def trajectories(trace: Path) -> Iterable[tuple[str, Sequence[Round]]]:
    """Yield (session id, rounds); raises ``TraceError`` for sessions that do more than append."""
    for session in read_trace(trace):
        if not isinstance(session, TokenSession) or any(
            tokens is not None for tokens in session.retained_tokens
        ):
            raise TraceError(
                f"{trace}: session {session.session_id} does more than append, which this "
                "conversion does not support; give a trace of [append, generated] rounds"
            )
        yield session.session_id, session.trajectory.rounds


def convert(trace: Path, output: Path, cumulative: bool) -> int:
    """Write ``output`` and return the number of turns."""
    rows = cumulative_rows if cumulative else delta_rows
    ids = count(1)
    turns = 0
    with output.open("w", encoding="utf-8") as file:
        for session_id, rounds in trajectories(trace):
            for row in rows(session_id, rounds, ids):
                file.write(json.dumps(row, separators=(",", ":")) + "\n")
                turns += 1
    return turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--cumulative", action="store_true")
    arguments = parser.parse_args()
    turns = convert(arguments.trace, arguments.output, arguments.cumulative)
    print(f"{arguments.output}: {turns} turns")


if __name__ == "__main__":
    main()
