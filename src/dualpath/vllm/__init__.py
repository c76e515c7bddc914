"""DualPath inside vLLM: a connector, a worker class, a scheduler class, one wrapped function.

This package and ``dualpath.laboratory.models`` are the only ones that import vLLM and torch.
"""
