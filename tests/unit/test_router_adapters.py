"""Adapters are the same on all engines; an engine with others is refused with the reason."""

import msgspec
import pytest
from tests.unit.router_fakes import FakeEngine

from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError, DualPathError, EngineRefusedError
from dualpath.core.key_cache import Adapter
from dualpath.router.refusals import ControlRefusal
from dualpath.router.scheduler.registry import Registry
from dualpath.router.served_adapters import ServedAdapters

SQL = Adapter("sql", "/adapters/sql", "a" * 64)
CHAT = Adapter("chat", "/adapters/chat", "b" * 64)


def serving(*adapters: Adapter) -> Registry:
    return Registry(adapters=ServedAdapters({each.name: each.path for each in adapters}))


async def join(registry: Registry, engine_id: str, *adapters: Adapter) -> None:
    hello = FakeEngine(engine_id, Role.PREFILL, set()).hello()
    registry.admit(msgspec.structs.replace(hello, adapters=adapters))


async def refused(registry: Registry, *adapters: Adapter) -> str:
    with pytest.raises(EngineRefusedError) as found:
        await join(registry, "other", *adapters)
    assert found.value.reason is ControlRefusal.ADAPTERS
    return str(found.value)


async def test_what_the_first_engine_has_is_what_requests_get() -> None:
    registry = serving(SQL, CHAT)
    with pytest.raises(DualPathError, match="no engine with adapter 'sql'"):
        registry.adapters.adapter("sql", SQL.path)
    await join(registry, "first", SQL, CHAT)
    assert registry.adapters.adapter("sql", SQL.path) == SQL
    assert registry.adapters.adapter("chat", CHAT.path) == CHAT


async def test_an_engine_without_an_adapter_or_with_another_stays_out() -> None:
    registry = serving(SQL, CHAT)
    assert "no adapter 'chat'; add --lora-modules chat=/adapters/chat" in await refused(
        registry, SQL
    )
    moved = msgspec.structs.replace(CHAT, path="/elsewhere")
    assert "at '/elsewhere', this router at '/adapters/chat'" in await refused(registry, SQL, moved)
    with pytest.raises(DualPathError):
        registry.adapters.adapter("sql", SQL.path)  # A refused engine has announced nothing.
    await join(registry, "first", SQL, CHAT)
    retrained = msgspec.structs.replace(SQL, digest="c" * 64)
    assert "other weights or settings of adapter 'sql'" in await refused(registry, retrained, CHAT)
    assert registry.adapters.adapter("sql", SQL.path) == SQL


async def test_engines_may_have_adapters_that_are_not_served_yet() -> None:
    registry = serving(SQL)
    await join(registry, "first", SQL, CHAT)
    await join(registry, "second", SQL, msgspec.structs.replace(CHAT, digest="d" * 64))
    with pytest.raises(DualPathError):
        registry.adapters.adapter("chat", CHAT.path)


def test_the_front_end_takes_no_adapter_beside_its_list() -> None:
    served = ServedAdapters({"sql": SQL.path})
    served.check_served("sql", SQL.path)
    for name, path in (("sql", "/elsewhere"), ("chat", CHAT.path)):
        with pytest.raises(ConfigError, match="none of those that the router was started with"):
            served.check_served(name, path)
