"""What a cluster did: emulated engines, faults, nodes on one machine, experiments, the demo."""

__version__ = "0.1.0"
