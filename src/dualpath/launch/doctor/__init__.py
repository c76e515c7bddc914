"""Checks whether a node has everything that an engine needs, with remedies."""
