"""What a command logs, on standard error: when, how serious, who says it, what.

Events from INFO on, of dualpath; warnings of what it is built on.  Processes with vLLM take vLLM's
lines once they know them (``vllm.engine_arguments.join_vllm_logging``).
"""

import logging

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def begin_log_lines() -> None:
    """Give this process's log lines time and level; whoever has handlers already keeps them."""
    logging.basicConfig(format=_FORMAT)
    logging.getLogger("dualpath").setLevel(logging.INFO)
