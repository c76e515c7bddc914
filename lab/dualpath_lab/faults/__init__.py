"""Fault injection: faults on real and simulated clusters, and checks that KV stays correct."""
