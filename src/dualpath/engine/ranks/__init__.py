"""Engines of several devices: the leader and the ranks that follow it."""
