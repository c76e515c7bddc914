"""Moves bytes between places: NIXL, and an in-process twin that passes the same contract."""
