"""Checks of a node: is everything there that an engine needs, and what to do if not."""
