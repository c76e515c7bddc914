"""The engines' token API, which is vLLM's: its bodies, its statuses, its client."""
