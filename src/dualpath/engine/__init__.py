"""Live data plane inside an engine: traffic manager, DRAM buffer, read queue, control link."""
