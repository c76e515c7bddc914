"""The compiled core: the reference core's decisions and numbers from arrays and numba (§6)."""
