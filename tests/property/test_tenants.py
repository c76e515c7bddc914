"""No tenant ever gets another one's blocks: salts, and the names of requests."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dualpath.core.blocks import block_keys
from dualpath.core.errors import BadRequestError
from dualpath.router.requests.request import LARGEST_SALT_CHARACTERS, check_salt

salts = st.none() | st.text(
    st.characters(exclude_categories=["Cs"]), min_size=1, max_size=LARGEST_SALT_CHARACTERS
)
#: Few tokens, so that prompts are often alike.
prompts = st.lists(st.integers(0, 2), max_size=24)


@given(salts, salts, prompts, prompts, st.integers(1, 5))
def test_keys_under_two_salts_have_nothing_in_common(salt, other, prompt, others_prompt, block):
    """No salt is a tenant as well: requests without a salt share blocks with each other only."""
    assume(salt != other)
    check_salt(salt)
    check_salt(other)
    mine = block_keys(prompt, block, cache_salt=salt)
    theirs = block_keys(others_prompt, block, cache_salt=other)
    assert not set(mine) & set(theirs)


@given(salts, prompts, prompts, st.integers(1, 5))
def test_equal_keys_mean_equal_prefixes(salt, prompt, other, block):
    mine, theirs = (block_keys(p, block, cache_salt=salt) for p in (prompt, other))
    same = sum(1 for a, b in zip(mine, theirs, strict=False) if a == b)
    assert prompt[: same * block] == other[: same * block]
    assert len({*mine, *theirs}) == len(mine) + len(theirs) - same


@pytest.mark.parametrize("salt", ["", "x" * (LARGEST_SALT_CHARACTERS + 1), "\ud800"])
def test_a_salt_that_separates_no_tenants_is_refused(salt):
    with pytest.raises(BadRequestError, match="cache_salt"):
        check_salt(salt)
