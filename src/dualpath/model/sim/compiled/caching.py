"""The compiled loop on disk: found again by the text of everything that is compiled into it.

Numba looks at the file a cached function stands in, not at the files of what it calls.  So a digest
of all of them goes into the function's name, and by that into the name of the cache's files: what
was compiled from other text is never found.
"""

import hashlib
from collections.abc import Callable
from importlib import resources
from typing import Any

import numba

from dualpath.model.sim.compiled.kernels import KERNEL_MODULES

#: What is compiled besides this package and the modules of the kernels.
SHARED_MODULES = ("dualpath.model.sim.costs", "dualpath.model.sim.result")


def source_digest() -> str:
    """Return a digest of all sources that are compiled."""
    digest = hashlib.sha256()
    modules = {*SHARED_MODULES, *(module.__name__ for module in KERNEL_MODULES)}
    for module in sorted(modules):
        package, _, name = module.rpartition(".")
        digest.update(resources.files(package).joinpath(f"{name}.py").read_bytes())
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
