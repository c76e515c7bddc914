"""The compiled core: the reference core's events over tables, with numba.

What decides or counts is called, not written anew (``compiled.kernels``).  What stands here is for
the speed: tables with numbered columns instead of objects (``tables``, ``columns``), since each
array costs a compiled call registers and each column beside its fellows saves a cache miss; rows
asked for before they are needed (``lookahead``), since with many agents an event's rows are in no
cache; and no reference counting (``jit``).
"""

from dualpath.model.sim.compiled import kernels as kernels
