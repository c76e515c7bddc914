"""A whole cluster in one process, on virtual time, with every order of events decided by a seed."""
