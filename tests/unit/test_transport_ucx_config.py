"""UCX settings of an engine: refusals, precedence, and the use of a port range."""

import os
from pathlib import Path

import pytest

from dualpath.core.errors import ConfigError
from dualpath.engine.settings import parse_settings
from dualpath.transport.contract import Direction, RegionInfo, TransferState
from dualpath.transport.memory import allocate_registered
from dualpath.transport.nixl import nixl_package
from dualpath.transport.ucx_config import (
    DEFAULT_ENGINE_CONFIG,
    engine_config_text,
)

ESTABLISHED = "01"
ENGINE = {
    "role": "decode",
    "engine_id": "de-0",
    "router": "tcp://127.0.0.1:1",
    "api_url": "",
    "storage": "kv",
}


def test_settings_override_defaults_and_other_defaults_remain() -> None:
    text = engine_config_text({"TCP_USER_TIMEOUT": "9s", "IB_SL": "2"})
    settings = dict(pair.split("=") for pair in text.split(","))
    assert settings == {**DEFAULT_ENGINE_CONFIG, "TCP_USER_TIMEOUT": "9s", "IB_SL": "2"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"UCX_IB_SL": "2"}, "omit UCX_: 'IB_SL'"),
        ({"ib_sl": "2"}, "has the key 'ib_sl'"),
        ({"TLS": "tcp,self"}, "set UCX_TLS in the environment"),
        ({"IB_SL": "a=b"}, "sets IB_SL to 'a=b'"),
        ({"IB_SL": ""}, "sets IB_SL to ''"),
    ],
)
def test_settings_that_nixl_cannot_pass_are_refused_at_configuration(
    config: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_settings({**ENGINE, "nixl_engine_config": config})


def test_settings_reach_the_engine_as_texts() -> None:
    settings = parse_settings({**ENGINE, "nixl_engine_config": {"IB_SL": "2"}})
    assert settings.nixl_engine_config == {"IB_SL": "2"}
    assert parse_settings(ENGINE).nixl_engine_config == {}


def test_a_warning_is_logged_if_the_environment_overrides(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UCX_IB_SL", "1")
    engine_config_text({"IB_SL": "1"})
    assert not caplog.messages
    engine_config_text({"IB_SL": "2"})
    assert caplog.messages == [
        "UCX_IB_SL=1 of the environment overrides IB_SL=2 of nixl_engine_config"
    ]


def connections() -> set[tuple[int, int]]:
    """Return (local, remote) ports of this process's TCP connections."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(descriptor))
        except FileNotFoundError:  # the one that lists the folder
            continue
    found = set()
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, *rest = line.split()
        if state == ESTABLISHED and f"socket:[{rest[5]}]" in own:
            found.add((int(local.rpartition(":")[2], 16), int(remote.rpartition(":")[2], 16)))
    return found


@pytest.mark.nixl
def test_transfers_use_only_the_ports_of_both_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(nixl_package())
    from dualpath.transport.nixl import NixlTransport

    monkeypatch.setenv("UCX_TLS", "tcp")
    ranges = {"pe": range(21504, 21760), "de": range(22016, 22272)}
    before = connections()
    memory, size = allocate_registered(2 * 4096), 4096
    engines = {}
    for name, ports in ranges.items():
        config = {"TCP_PORT_RANGE": f"{ports[0]}-{ports[-1]}"}
        engines[name] = NixlTransport(f"{name}-{os.getpid()}-ports", engine_config=config)
        base = memory.address + len(engines) % 2 * size
        engines[name].register(RegionInfo("kv", base, size, size, 1), memory)
    peer = engines["de"].info()
    engines["pe"].connect(peer)

    transfer = engines["pe"].post(Direction.WRITE, "kv", [0], peer.agent, "kv", [0])
    while transfer.poll() is TransferState.MOVING:
        pass
    made = connections() - before

    transfer.release()
    for engine in engines.values():
        engine.close()
    assert made
    # The connecting side has any port, the accepting side one of its range, which filters match.
    assert all(
        any(port in ports for port in connection for ports in ranges.values())
        for connection in made
    ), made
    assert all(
        any(ports.start <= local < ports.stop for local, _ in made) for ports in ranges.values()
    )
