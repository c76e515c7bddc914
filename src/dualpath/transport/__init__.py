"""Transfers of bytes between engines: NIXL, cross-memory attach, and an in-process reference."""
