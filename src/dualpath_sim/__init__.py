"""What a cluster would do: catalog of models and clusters, simulator, the paper's evaluation, planner."""
