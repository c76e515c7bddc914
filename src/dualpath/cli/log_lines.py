"""Logging of commands, to standard error: time, level, logger, message.

INFO and above of dualpath, WARNING and above of libraries.  Processes with vLLM switch to vLLM's
log format once vLLM is imported (``vllm.engine_arguments.join_vllm_logging``).
"""

import logging

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logging() -> None:
    """Configure logging of this process, unless it has handlers already."""
    logging.basicConfig(format=_FORMAT)
    logging.getLogger("dualpath").setLevel(logging.INFO)
