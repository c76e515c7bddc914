"""Measurements on a lab: real bytes over shaped links, as commands (`dualpath lab run|bench`)."""
