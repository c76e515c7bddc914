"""A router may open as many files as its system allows, since every stream takes two."""

from resource import RLIM_INFINITY

import pytest

from dualpath.router.observe.open_files import WANTED_OPEN_FILES, raised_limit


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1024, 1 << 20, WANTED_OPEN_FILES),
        (1024, RLIM_INFINITY, WANTED_OPEN_FILES),
        (1024, 20000, 20000),  # vLLM's own server stays at 1024 here
        (100_000, 1 << 20, 100_000),
        (RLIM_INFINITY, RLIM_INFINITY, RLIM_INFINITY),
    ],
)
def test_the_limit_rises_as_far_as_it_may_and_never_falls(
    soft: int, hard: int, raised: int
) -> None:
    assert raised_limit(soft, hard) == raised
