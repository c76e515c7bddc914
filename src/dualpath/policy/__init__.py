"""Decisions of §6 as pure objects and functions: no I/O, no clock, no randomness."""
