"""The life of a request: admission, attempts, what became of it."""
