"""DualPath inside vLLM: one connector, one worker class, one scheduler class; no patches.

This package and ``dualpath.laboratory.models`` are the only ones that import vLLM and torch.
"""
