"""Starts a peer's vLLM API server in the peer's environment, with fixes.

    python peer_engine.py ARGUMENTS OF VLLM'S API SERVER

Without these two, a peer would be slower than necessary:

* NIXL's Python API makes its progress thread spin.  No public option changes that, so the delay
  (microseconds, ``PEER_NIXL_PROGRESS_DELAY_US``) is set in the configuration of every new agent.
* On CPUs vLLM spawns its engine core, which imports everything again; it is forked instead.

Without a third, vLLM's CPU build does not start with packages that import llvmlite: it reads
``__dict__`` of every object of every module, and llvmlite's library returns a function.
"""

import multiprocessing
import os
import runpy
import sys
from typing import Any

#: Also the entry point of a cluster's engines (``dualpath.launch.commands``, which is not
#: installed in a peer's environment).
SERVER = "vllm.entrypoints.launchers.api_server.entry"


def pause_nixl(delay_us: int) -> None:
    """Let the progress thread of every NIXL agent of this process sleep ``delay_us``."""
    from nixl import _api

    native_agent = _api.nixlBind.nixlAgent

    def agent_with_delay(name: str, config: Any) -> Any:  # noqa: ANN401 - NIXL has no types
        config.pthrDelay = delay_us
        return native_agent(name, config)

    _api.nixlBind.nixlAgent = agent_with_delay


def fork_engine_cores() -> None:
    """Make the API server fork its engine core."""
    from vllm.v1.engine import utils

    utils.get_mp_context = lambda: multiprocessing.get_context("fork")


def refuse_dunder_names() -> None:
    """Make llvmlite's library raise ``AttributeError`` for ``__dict__`` and similar names."""
    from llvmlite.binding import ffi

    library = type(ffi.lib)
    find = library.__getattr__

    def find_function(self: Any, name: str) -> Any:  # noqa: ANN401 - any attribute
        if name.startswith("__"):
            raise AttributeError(name)
        return find(self, name)

    library.__getattr__ = find_function


if __name__ == "__main__":
    sys.argv[0] = SERVER
    # So that vLLM can import the adapters in this folder.
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    if os.environ.get("PEER_NIXL_PROGRESS_DELAY_US"):
        pause_nixl(int(os.environ["PEER_NIXL_PROGRESS_DELAY_US"]))
    refuse_dunder_names()
    fork_engine_cores()
    runpy.run_module(SERVER, run_name="__main__")
