"""Commands of the simulator."""
