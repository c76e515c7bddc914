"""The check of a machine with GPUs, `dualpath gpu-check`; README.md in this folder.

No GPU has run any of it yet.
"""
