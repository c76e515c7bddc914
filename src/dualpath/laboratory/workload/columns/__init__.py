"""Agents as columns for the simulator: every round with its prompt, hit and answer in tokens."""
