"""DualPath inside vLLM: a KV connector, a worker class, a scheduler class and one wrapped function.

This package and ``dualpath_lab.models`` are the only ones that import vLLM and torch.
"""
