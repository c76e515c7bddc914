"""The model: what a cluster would do (simulator, catalog, the paper's figures)."""
