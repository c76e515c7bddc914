"""The router's HTTP without vLLM: what light servers share, and what is asked of a cluster."""
