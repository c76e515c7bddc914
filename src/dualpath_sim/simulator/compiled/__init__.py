"""The compiled core: the reference core's events over tables, with numba."""
