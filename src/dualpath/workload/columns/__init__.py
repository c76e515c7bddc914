"""Agents as arrays for the simulator: prompt, hit and generated tokens of every round."""
