"""Experiments on a lab: real bytes over shaped links (commands `dualpath lab run|bench`)."""
