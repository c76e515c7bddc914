"""A whole cluster in one process, on virtual time; a seed decides the order of all events."""
