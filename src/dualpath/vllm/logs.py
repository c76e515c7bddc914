"""Lets dualpath's log lines appear where vLLM's do, in vLLM's format."""

import logging


def join_vllm_logging() -> None:
    """Give the ``dualpath`` logger vLLM's handlers and level; idempotent."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("dualpath")
    ours.handlers = list(theirs.handlers)
    ours.setLevel(theirs.level or logging.INFO)
    ours.propagate = False
