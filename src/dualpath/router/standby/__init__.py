"""Schedulers of one cluster take turns: one serves, the others wait with everything loaded."""
