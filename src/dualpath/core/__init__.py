"""Values every other package speaks in: no I/O, no clock, no randomness."""
