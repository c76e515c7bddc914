"""Faults on purpose, and what must hold all the same."""
