"""Which transport an engine opens, by its setting and its machine."""

from typing import Literal

import pytest

from dualpath.core.cluster import HostProcess, Role
from dualpath.engine.control import surroundings
from dualpath.engine.control.surroundings import LIVE
from dualpath.engine.passes.device import HostDevice
from dualpath.engine.settings import EngineSettings
from dualpath.transport.contract import Transport
from dualpath.transport.in_process import InProcessFabric, InProcessTransport
from dualpath.transport.shared_memory import NearestTransport, SharedMemoryTransport


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transport within the process in place of NIXL."""
    fabric = InProcessFabric()
    monkeypatch.setattr(
        surroundings, "_open_nixl", lambda agent, settings: InProcessTransport(agent, fabric)
    )


def opened(transport: Literal["auto", "nixl", "memory"]) -> Transport:
    settings = EngineSettings(
        role=Role.DECODE,
        engine_id="de-0",
        router="tcp://127.0.0.1:1",
        api_url="",
        storage="kv",
        transport=transport,
    )
    found = LIVE.open_transport("de-0-1", settings, HostDevice())
    found.close()
    return found


@pytest.mark.parametrize(
    ("transport", "kind"),
    [
        ("auto", NearestTransport),
        ("nixl", InProcessTransport),
        ("memory", SharedMemoryTransport),
    ],
)
def test_the_setting_selects_the_transport(
    transport: Literal["auto", "nixl", "memory"], kind: type[Transport]
) -> None:
    assert type(opened(transport)) is kind


def test_a_process_that_others_cannot_recognise_uses_the_network_and_logs_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(surroundings, "this_process", HostProcess)
    assert type(opened("auto")) is InProcessTransport
    assert "engines of this machine are reached through NIXL" in caplog.text
