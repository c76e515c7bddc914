"""The DRAM of an engine: what other engines may map, and what they may not."""

import os
from typing import Literal

import pytest

from dualpath.core.blocks import BlockGeometry
from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.engine.buffer.engine_memory import EngineMemory, open_memory
from dualpath.engine.ranks.group import ONE_RANK
from dualpath.engine.settings import EngineSettings

GEOMETRY = BlockGeometry.uniform(layers=2, block_tokens=4, layer_block_bytes=4096)


def memory_of(role: Role, transport: Literal["auto", "nixl", "memory"]) -> EngineMemory:
    settings = EngineSettings(
        role=role,
        engine_id="engine",
        router="tcp://127.0.0.1:1",
        api_url="",
        storage="kv",
        transport=transport,
        touch_memory=True,
        buffer_bytes=8 * GEOMETRY.full_block_bytes,
    )
    return open_memory(settings, GEOMETRY, ONE_RANK)


def refuse(name: str, flags: int) -> int:
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize("transport", ["auto", "memory"])
def test_only_the_buffer_of_a_decode_engine_can_be_mapped(
    transport: Literal["auto", "memory"],
) -> None:
    decode, prefill = memory_of(Role.DECODE, transport), memory_of(Role.PREFILL, transport)
    assert decode.buffer.file is not None
    assert decode.buffer.size_bytes == prefill.buffer.size_bytes == 8 * GEOMETRY.full_block_bytes
    assert [memory.file for memory in (decode.staging, prefill.buffer, prefill.staging)] == [
        None
    ] * 3


def test_with_nixl_alone_no_memory_can_be_mapped() -> None:
    assert memory_of(Role.DECODE, "nixl").buffer.file is None


def test_a_decode_engine_that_cannot_share_memory_uses_nixl_and_logs_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "memfd_create", refuse)
    assert memory_of(Role.DECODE, "auto").buffer.file is None
    assert "use NIXL to reach this engine: memory cannot be shared" in caplog.text
    with pytest.raises(ConfigError, match="allow memfd_create"):
        memory_of(Role.DECODE, "memory")
