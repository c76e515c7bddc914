"""The event loop of commands that serve without vLLM: uvloop's if it is installed."""

import asyncio
from collections.abc import Coroutine
from typing import Any


def run_served(main: Coroutine[Any, Any, None]) -> None:
    """Run until ``main`` returns, as ``asyncio.run``."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)
