"""DRAM: slots, cached blocks, and what is held for agents whose tools run."""
