"""Opens NIXL agents: the import, the progress thread's pause, UCX's environment.

All workarounds for the library are in this file.

* ``nixl_cu12`` is imported, not ``nixl``: the latter imports torch (1.2 s, 234 MB).
* The Python API creates agents with ``pthrDelay = 0``, which makes the UCX progress thread spin on
  a full core.  There is no public setting, so the constructor of the native agent is replaced
  during creation and sets the field.  On RDMA hardware 0 is right: completions arrive without the
  CPU, and the spinning thread notices them early.  With a delay the thread still wakes on events:
  100 and 1000 µs cost no latency over shared memory or TCP and 1.8 % of a core when idle
  (``benchmarks/transport_moves.py``).
* ``UCX_*`` variables of the user always override our settings.
"""

import os
import threading
from typing import Any

from dualpath.core.errors import ConfigError
from dualpath.core.extras import extra

_creation_lock = threading.Lock()


def load_nixl() -> Any:  # noqa: ANN401 - the library carries no types
    """Import the NIXL API module; raises ``ConfigError`` if it is not installed."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    try:
        from nixl_cu12 import _api
    except ImportError as error:
        raise ConfigError(
            f"NIXL cannot be imported ({error}); {extra('nixl').remedy}, or run emulated engines "
            "of one machine without it: --transport memory"
        ) from error
    return _api


def open_agent(name: str, progress_delay_us: int | None) -> Any:  # noqa: ANN401 - as above
    """Create an agent without backends; ``progress_delay_us`` None means no progress thread.

    The agent is thread-safe (strict lock mode).
    """
    api = load_nixl()
    bindings = api.nixlBind
    native_agent = bindings.nixlAgent

    def native_agent_with_delay(agent_name: str, config: Any) -> Any:  # noqa: ANN401 - as above
        config.pthrDelay = progress_delay_us or 0
        return native_agent(agent_name, config)

    config = api.nixl_agent_config(
        enable_prog_thread=progress_delay_us is not None,
        backends=[],
        sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
    )
    with _creation_lock:
        bindings.nixlAgent = native_agent_with_delay
        try:
            return api.nixl_agent(name, config)
        finally:
            bindings.nixlAgent = native_agent


def nixl_errors(api: Any) -> tuple[type[Exception], ...]:  # noqa: ANN401 - as above
    """Return the exception types that NIXL raises; they have no common base class."""
    bindings = api.nixlBind
    names = [name for name in dir(bindings) if name.startswith("nixl") and name.endswith("Error")]
    return tuple(getattr(bindings, name) for name in names)
