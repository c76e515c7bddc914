"""The data plane of a live engine: traffic manager, DRAM buffer, read queue, control link."""
