"""How many files a server process may have open: a stream is one at an engine, two at a router."""

import resource

#: What vLLM's server asks for as well, which gives up where the hard limit is lower; processes
#: usually start with 1024.
WANTED_OPEN_FILES = 65535


def allow_many_streams() -> None:
    """Raise this process's soft limit on open files to ``WANTED_OPEN_FILES`` or the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised_limit(soft, hard), hard))


def raised_limit(soft: int, hard: int) -> int:
    """Return the soft limit to set, never below ``soft``; either may be without limit."""
    if soft == resource.RLIM_INFINITY:
        return soft
    allowed = WANTED_OPEN_FILES if hard == resource.RLIM_INFINITY else min(WANTED_OPEN_FILES, hard)
    return max(soft, allowed)
