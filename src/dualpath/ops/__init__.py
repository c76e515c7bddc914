"""Operation of clusters: launching processes, checking nodes, network settings."""
