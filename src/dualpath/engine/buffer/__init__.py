"""DRAM: slots, cached blocks, and blocks retained for agents that wait for a tool."""
