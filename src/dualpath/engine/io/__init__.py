"""Storage I/O: look-ups, the read queue, writes of new blocks."""
