"""vLLM's API server with its engine core forked: `python -m dualpath.launch.forked_engine …`.

On CPUs vLLM spawns the engine core, which imports everything again: many seconds of CPU per engine.
Its reason, OpenMP threads that do not survive a fork, does not apply here: this process has not
computed anything yet.  So vLLM's function `get_mp_context` is replaced in this process, where
engine cores and their ranks are started.  On other devices nothing is replaced, and engines that an
operator starts with vLLM's own command do not use this module.
"""

import importlib
import multiprocessing
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from dualpath.launch.commands import ENGINE_ENTRY


def prepare_engine() -> None:
    """Make this process fork its engine core on a CPU, as vLLM does on GPUs."""
    # vLLM derives its block keys from PYTHONHASHSEED; test runners often set it.
    os.environ.pop("PYTHONHASHSEED", None)
    platforms = importlib.import_module("vllm.platforms")
    if platforms.current_platform.is_cpu():
        for starts_processes in ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor"):
            setattr(  # noqa: B010 - a module's function, replaced on purpose
                importlib.import_module(starts_processes),
                "get_mp_context",
                lambda: multiprocessing.get_context("fork"),
            )


def run_entry(entry: str, command: Sequence[str]) -> NoReturn:
    """Run ``entry`` ("module:function") like a command typed in a shell, and exit with it."""
    module, _, function = entry.partition(":")
    sys.argv = [module, *command]
    sys.exit(getattr(importlib.import_module(module), function)())


if __name__ == "__main__":
    prepare_engine()
    run_entry(ENGINE_ENTRY, sys.argv[1:])
