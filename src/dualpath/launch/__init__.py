"""Launches a cluster, on this machine or on Ray: router, prefill engines, decode engines."""
