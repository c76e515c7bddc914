"""Modules whose functions both cores call: compiled code imports them as they stand.

A function on plain numbers and arrays in one of these modules is a kernel.  ``register_jitable``
lets compiled code call it and leaves it as it is for Python, so that there is no second version
of any rule, and a new kernel is registered by being there.
"""

import inspect

from numba.extending import register_jitable

from dualpath.core import blocks
from dualpath.plan import counts
from dualpath.policy import accounts, baselines, batching, decode, prefill, read_side

KERNEL_MODULES = (blocks, counts, accounts, baselines, batching, decode, prefill, read_side)

for module in KERNEL_MODULES:
    for _, function in inspect.getmembers(module, inspect.isfunction):
        if function.__module__ == module.__name__:
            register_jitable(function)
