"""An engine's account: what the ledger adds and strikes, on columns of plain integers (§6.1).

``accounts`` has one list or array per column, with one row per engine; ``node_reads`` one entry per
node, the reading queue of its storage NIC.  ``policy.load`` has such columns per group as lists,
the simulator's compiled core as one table of arrays: these functions compile with numba as they
are.

An engine's load is what it reported and what it was given since: a request is *held* from its
placement until its other engine is known, *assigned* from then on until a report counts it in.
"""

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
Column = list[int] | IntArray
"""What kernels read by index: lists in Python, arrays where they are compiled."""
Table = list[list[int]] | NDArray[np.signedinteger]
"""The same in two dimensions, by row and then by column."""
Accounts = list[list[int]] | IntArray

#: Columns.  Unfinished tokens and requests (tok_e and seq_e), remaining HBM, which is negative when
#: a report came in below what was assigned since, and the engine's part of its node's reading
#: queue; of these what is held, and what is assigned and in no report yet; the number of the latest
#: assignment, and of the latest that a report counts in; the engine's node; of a PE the tokens of
#: its assigned requests that are no hits and not computed yet, which no report knows.
(
    TOK,
    SEQ,
    FREE_HBM,
    READS,
    HELD_TOKENS,
    HELD_REQUESTS,
    EXTRA_TOKENS,
    EXTRA_REQUESTS,
    EXTRA_READS,
    LAST_SEQ,
    REPORTED_SEQ,
    NODE,
    COMPUTING,
) = range(13)
ACCOUNT_COLUMNS = 13


def new_account(hbm_tokens: int, node: int) -> list[int]:
    """Return the row of an engine without work."""
    row = [0] * ACCOUNT_COLUMNS
    row[FREE_HBM], row[NODE] = hbm_tokens, node
    return row


def decode_tokens(prompt_tokens: int, max_new_tokens: int, reserve_tokens: int) -> int:
    """Return len_r, what a request counts for at its DE: its prompt and what it may generate.

    Of the latter ``reserve_tokens`` at most; at its PE it counts for its prompt.
    """
    return prompt_tokens + min(max_new_tokens, reserve_tokens)


def charge(accounts: Accounts, row: int, tokens: int, requests: int) -> None:
    """Count so much more (or, below 0, less) to an engine's load."""
    accounts[TOK][row] += tokens
    accounts[SEQ][row] += requests
    accounts[FREE_HBM][row] -= tokens


def hold(accounts: Accounts, row: int, tokens: int) -> None:
    """Charge a request to an engine that does not know of it yet."""
    accounts[HELD_TOKENS][row] += tokens
    accounts[HELD_REQUESTS][row] += 1
    charge(accounts, row, tokens, 1)


def assign(accounts: Accounts, row: int, tokens: int, more_tokens: int) -> int:
    """Turn a held charge into an assigned one; return its number, counted from 1.

    The request turned out to count for ``more_tokens`` more than it was held for.
    """
    charge(accounts, row, more_tokens, 0)
    accounts[HELD_TOKENS][row] -= tokens
    accounts[HELD_REQUESTS][row] -= 1
    accounts[EXTRA_TOKENS][row] += tokens + more_tokens
    accounts[EXTRA_REQUESTS][row] += 1
    accounts[LAST_SEQ][row] += 1
    return int(accounts[LAST_SEQ][row])


def strike_held(accounts: Accounts, row: int, tokens: int) -> None:
    """Strike a request that was placed only."""
    accounts[HELD_TOKENS][row] -= tokens
    accounts[HELD_REQUESTS][row] -= 1
    charge(accounts, row, -tokens, -1)


def strike(accounts: Accounts, row: int, tokens: int) -> None:
    """Strike an assigned request that no report has counted in."""
    accounts[EXTRA_TOKENS][row] -= tokens
    accounts[EXTRA_REQUESTS][row] -= 1
    charge(accounts, row, -tokens, -1)


def charge_computing(accounts: Accounts, row: int, tokens: int) -> None:
    """Charge so many tokens (or, below 0, strike them) that a PE has to compute."""
    accounts[COMPUTING][row] += tokens


def charge_read(
    accounts: Accounts, node_reads: Column, node_totals: Column, row: int, tokens: int
) -> None:
    """Charge a read to an engine and its node; ``node_totals`` is all that a node was given."""
    node = accounts[NODE][row]
    accounts[EXTRA_READS][row] += tokens
    accounts[READS][row] += tokens
    node_reads[node] += tokens
    node_totals[node] += tokens


def change(
    accounts: Accounts,
    node_reads: Column,
    node_totals: Column,
    row: int,
    tokens: int,
    read_tokens: int,
    uncounted: bool,
) -> None:
    """Let an assigned request count for so much more (or, below 0, less), also in what is read.

    ``uncounted``: no report counts it in yet.
    """
    node = accounts[NODE][row]
    charge(accounts, row, tokens, 0)
    accounts[READS][row] += read_tokens
    node_reads[node] += read_tokens
    node_totals[node] += read_tokens
    if uncounted:
        accounts[EXTRA_TOKENS][row] += tokens
        accounts[EXTRA_READS][row] += read_tokens


def strike_read(accounts: Accounts, node_reads: Column, row: int, tokens: int) -> None:
    """Strike a read that no report has counted in."""
    accounts[EXTRA_READS][row] -= tokens
    accounts[READS][row] -= tokens
    node_reads[accounts[NODE][row]] -= tokens


def count_in(accounts: Accounts, row: int, tokens: int, requests: int, read_tokens: int) -> None:
    """The next report holds so much of what was assigned: it is no longer extra."""
    accounts[EXTRA_TOKENS][row] -= tokens
    accounts[EXTRA_REQUESTS][row] -= requests
    accounts[EXTRA_READS][row] -= read_tokens


def count_in_all(accounts: Accounts, row: int) -> None:
    """The next report holds all that was assigned."""
    accounts[EXTRA_TOKENS][row] = 0
    accounts[EXTRA_REQUESTS][row] = 0
    accounts[EXTRA_READS][row] = 0


def take_report(
    accounts: Accounts,
    node_reads: Column,
    row: int,
    assign_seq: int,
    unfinished_requests: int,
    unfinished_tokens: int,
    read_queue_tokens: int,
    free_hbm_tokens: int,
) -> None:
    """Take over a report after what it counts in was taken out of the extra columns."""
    more_tokens = accounts[EXTRA_TOKENS][row] + accounts[HELD_TOKENS][row]
    more_requests = accounts[EXTRA_REQUESTS][row] + accounts[HELD_REQUESTS][row]
    reads = read_queue_tokens + accounts[EXTRA_READS][row]
    node_reads[accounts[NODE][row]] += reads - accounts[READS][row]
    accounts[TOK][row] = unfinished_tokens + more_tokens
    accounts[SEQ][row] = unfinished_requests + more_requests
    accounts[FREE_HBM][row] = free_hbm_tokens - more_tokens
    accounts[READS][row] = reads
    accounts[REPORTED_SEQ][row] = assign_seq
