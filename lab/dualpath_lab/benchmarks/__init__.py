"""Benchmarks: figures of parts, each from a command of its own."""
