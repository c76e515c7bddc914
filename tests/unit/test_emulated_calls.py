"""Which calls an emulated engine's HTTP server reports as open to the router's inquiries."""

import asyncio
import threading
from pathlib import Path

import pytest
from tests.emulated_cluster import cluster
from tests.guard import GUARD_S

from dualpath.core.cluster import Role
from dualpath.core.modes import Mode
from dualpath.router.api_keys import engine_headers
from dualpath.router.token_api.client import TokenApiClient
from dualpath_lab.emulated import engine_server
from dualpath_lab.emulated.checkable_kv import TokenPrefix


async def test_a_call_is_open_before_the_keys_of_its_long_prompt_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the router would take it for lost: a million tokens take longer than its patience."""
    computing, go_on = threading.Event(), threading.Event()

    def slow(*prompt: object, **options: object) -> TokenPrefix:
        computing.set()
        assert go_on.wait(GUARD_S)
        return TokenPrefix(*prompt, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(engine_server, "TokenPrefix", slow)
    monkeypatch.setattr(engine_server, "SHORT_PROMPT_TOKENS", 0)
    async with cluster(tmp_path, Mode.DUALPATH) as made:
        asked = asyncio.create_task(made.ask(range(1, 38), 4))
        assert await asyncio.to_thread(computing.wait, GUARD_S)
        (engine,) = (e for e in made.service.registry.all() if e.info.role is Role.PREFILL)
        api = TokenApiClient(engine_headers())
        calls = await api.open_calls(engine.info)
        go_on.set()
        await asked
        assert calls is not None
        assert list(calls.values()) == [None]
        assert not await api.open_calls(engine.info)
        await api.aclose()
