"""Emulated engines: a cost model replaces the kernels; router, data path and KV bytes are real."""
