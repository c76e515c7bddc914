"""What is compiled: the kernels, shared by both cores, and the loop, kept on disk.

A function on plain numbers and arrays in one of ``KERNEL_MODULES`` is a kernel.
``register_jitable`` lets compiled code call it and leaves it as it is for Python, so that there is
no second version of any rule, and a new kernel is registered by being there.

The compiled loop is found again by the text of everything that is compiled into it.  Numba looks at
the file a cached function stands in, not at the files of what it calls.  So a digest of all of them
goes into the function's name, and by that into the name of the cache's files: what was compiled
from other text is never found.
"""

import hashlib
import inspect
from collections.abc import Callable
from importlib import resources
from typing import Any

import numba
from numba.extending import register_jitable

from dualpath.core import blocks
from dualpath.model.sim import carried, derived, result, rules
from dualpath.plan import counts
from dualpath.policy import (
    accounts,
    baselines,
    batching,
    decode,
    events,
    kept,
    prefill,
    read_side,
    recompute,
    reuse,
)

KERNEL_MODULES = (
    *(blocks, counts, carried, rules),
    *(accounts, baselines, batching, decode, kept, prefill, read_side, recompute, reuse),
)

#: Modules whose constants are compiled in.
CONSTANT_MODULES = (derived, events, result)

for module in KERNEL_MODULES:
    for _, function in inspect.getmembers(module, inspect.isfunction):
        if function.__module__ == module.__name__:
            register_jitable(function)


def source_digest() -> str:
    """Return a digest of all sources that are compiled."""
    digest = hashlib.sha256()
    for name in sorted(module.__name__ for module in (*KERNEL_MODULES, *CONSTANT_MODULES)):
        package, _, file_name = name.rpartition(".")
        digest.update(resources.files(package).joinpath(f"{file_name}.py").read_bytes())
    for file in sorted(resources.files(__package__).iterdir(), key=lambda file: file.name):
        if file.name.endswith(".py"):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def cached(function: Callable[..., int]) -> Any:  # noqa: ANN401  # numba's types are untyped
    """Compile a function that makes no arrays, once for all processes that can share files."""
    function.__qualname__ = f"{function.__qualname__}_{source_digest()}"
    options = {"_nrt": False, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:
        # No directory that could be written to: every process compiles for itself.
        return numba.njit(**options)(function)
