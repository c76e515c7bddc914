"""What the KV in an engine's DRAM is worth when a request is placed (beyond the paper).

A block that an engine keeps since an earlier request needs no storage NIC.  The categories of
§6.1 stay as they are: who is overloaded, whose reading queue is long, who has room.  Within a
category, another than the usual engine is taken if it keeps more of the prompt and is heavier by
less than that is worth: so no engine is chosen for its cache alone where its queue makes it slower,
and with nothing kept the rules are the paper's.

- *At a PE* tokens are time to compute, so what is kept counts as the tokens that it computes while
  they would be read: the PE with the least (tok + own) / computing rate + (hit - kept) / reading
  rate.  Reading and computing may overlap; they are added because the storage NIC that one request
  does not need is another's.  The rates are those behind α and β, 3 s of reading and 5 s of
  computing.
- *At a DE* tokens are KV in its HBM and there is no queue for time.  A token more than another DE
  has is read from HBM in every step, some hundred times in a turn; a token that is kept and left
  behind is read once through a storage NIC, which is some hundred times slower than HBM, and is
  sent besides.  For a few hundred generated tokens the one costs about half of the other, so that
  a token kept counts as two tokens less.  That holds for the threshold Z as well, which is a few
  percent above the mean: with few engines a conversation's own DE is above it half the time.
"""

from dualpath.policy.events import ALPHA_S, BETA_S, UNLIMITED_TOKENS

#: Of one token's reading in tokens computed; beyond it a threshold was set to no purpose.
LARGEST_WORTH = 1e6
#: Where neither rate is known, reading a token is taken to last as long as computing one.
UNKNOWN_WORTH = 1.0
#: What a kept token is worth at a DE.  HBM of 3.35 TB/s beside an eighth of a storage NIC of
#: 50 GB/s is 540 times as fast; a turn has about 270 steps.
DECODE_WORTH = 2.0
#: In a column of rows: no engine keeps anything of this request.
NOTHING_KEPT = -1


def prefill_worth(alpha_tokens: int, beta_tokens: int) -> float:
    """Return how many tokens a PE computes in the time in which its node reads one."""
    if max(alpha_tokens, beta_tokens) >= UNLIMITED_TOKENS:
        return UNKNOWN_WORTH
    computed_per_s, read_per_s = beta_tokens / BETA_S, max(alpha_tokens, 1) / ALPHA_S
    return min(computed_per_s / read_per_s, LARGEST_WORTH)


def weighed_tokens(load_tokens: int, kept_tokens: int, worth: float) -> int:
    """Return an engine's load less what it keeps of a prompt."""
    return load_tokens - int(kept_tokens * worth)
