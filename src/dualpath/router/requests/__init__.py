"""The life of a request: admission, attempts, refusals, what became of it."""
