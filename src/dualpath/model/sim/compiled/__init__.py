"""The compiled core: the same model with tables and numba; its kernels are the reference's own."""

from dualpath.model.sim.compiled import kernels as kernels
