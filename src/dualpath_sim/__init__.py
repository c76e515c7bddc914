"""What a cluster would do: catalog, simulator, the paper's evaluation, planner."""
