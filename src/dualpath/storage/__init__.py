"""Persistent Full Blocks: one backend per file, one contract (``contract.BlockStorage``)."""
