"""A vLLM API server for a peer, in the peer's environment: cured, otherwise as typed.

    python peer_engine.py ARGUMENTS OF VLLM'S API SERVER

Without them a peer looks slower here than it is:

* NIXL's Python API makes its progress thread spin.  Nothing public changes that, so the agent's
  configuration is given a pause (microseconds, ``PEER_NIXL_PROGRESS_DELAY_US``) as it is made.
* vLLM spawns its engine core on CPUs, which imports everything again; it is forked instead.

And one without which vLLM's CPU build does not start beside packages that import llvmlite: it asks
every object of every module for its ``__dict__``, and llvmlite's library answers with a function.
"""

import multiprocessing
import os
import runpy
import sys
from typing import Any

#: What starts the engines of a cluster as well (``dualpath.ops.launch.commands``, which is not
#: installed in a peer's environment).
SERVER = "vllm.entrypoints.launchers.api_server.entry"


def pause_nixl(delay_us: int) -> None:
    """Give every NIXL agent of this process a progress thread that sleeps ``delay_us``."""
    from nixl import _api

    native_agent = _api.nixlBind.nixlAgent

    def agent_with_delay(name: str, config: Any) -> Any:  # noqa: ANN401 - NIXL has no types
        config.pthrDelay = delay_us
        return native_agent(name, config)

    _api.nixlBind.nixlAgent = agent_with_delay


def fork_engine_cores() -> None:
    """Let the API server fork its engine core."""
    from vllm.v1.engine import utils

    utils.get_mp_context = lambda: multiprocessing.get_context("fork")


def refuse_dunder_names() -> None:
    """Let llvmlite's library have no ``__dict__``, instead of a function of that name."""
    from llvmlite.binding import ffi

    library = type(ffi.lib)
    find = library.__getattr__

    def find_function(self: Any, name: str) -> Any:  # noqa: ANN401 - whatever the library has
        if name.startswith("__"):
            raise AttributeError(name)
        return find(self, name)

    library.__getattr__ = find_function


if __name__ == "__main__":
    sys.argv[0] = SERVER
    # Adapters beside this file are found by vLLM under their own names.
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    if os.environ.get("PEER_NIXL_PROGRESS_DELAY_US"):
        pause_nixl(int(os.environ["PEER_NIXL_PROGRESS_DELAY_US"]))
    refuse_dunder_names()
    fork_engine_cores()
    runpy.run_module(SERVER, run_name="__main__")
