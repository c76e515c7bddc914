"""vLLM's API server with its engine core forked: `python -m dualpath.ops.launch.forked_engine …`.

On CPUs vLLM insists on spawning the engine core, which imports everything once more: many seconds
of CPU per engine.  Its reason, threads of OpenMP that do not survive a fork, does not hold here:
nothing was computed in this process yet.  So one function of vLLM is replaced in this process,
`get_mp_context`, where engine cores are started and where their ranks are.  On other devices
nothing is, and an engine that an operator starts with vLLM's own command never comes here.
"""

import importlib
import multiprocessing
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from dualpath.ops.launch.commands import ENGINE_ENTRY


def prepare_engine() -> None:
    """Let this process fork its engine core on a CPU, as vLLM does on GPUs."""
    # vLLM derives its block keys from it; test runners like to set it.
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
    """Run ``entry`` ("module:function") as if the command had been typed, and exit as it does."""
    module, _, function = entry.partition(":")
    sys.argv = [module, *command]
    sys.exit(getattr(importlib.import_module(module), function)())


if __name__ == "__main__":
    prepare_engine()
    run_entry(ENGINE_ENTRY, sys.argv[1:])
