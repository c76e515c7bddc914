"""The laboratory: what did happen (agents and their traces, emulated engines, nodes)."""
