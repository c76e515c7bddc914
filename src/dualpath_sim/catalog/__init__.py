"""Models, GPUs and clusters as data files, and what becomes of them: costs for the simulator."""
