"""A whole DualPath cluster on this machine: router, prefill engines, decode engines."""
