"""Emulated data-parallel ranks: they agree on a start, and all learn when one ends."""

import socket
import threading
import time
from pathlib import Path

import msgspec
import pytest
from tests.emulated_cluster import engine_settings
from tests.guard import GUARD_S

from dualpath.core.cluster import GroupRank, Role
from dualpath.core.errors import ConfigError, DeadlineError
from dualpath.core.modes import Mode
from dualpath.launch.ports import claim_port
from dualpath_lab.emulated import process
from dualpath_lab.emulated.settings import EmulatedSettings
from dualpath_lab.faults.cluster import ChaosCluster
from dualpath_lab.faults.engine_kinds import EmulatedEngines
from dualpath_lab.faults.failpoints import EngineKind
from dualpath_lab.faults.settings import ChaosSettings, EmulatedEnginesSettings, LoadSettings


def alone_in(tmp_path: Path) -> EmulatedSettings:
    return engine_settings(Role.PREFILL, "pe", "tcp://127.0.0.1:1", tmp_path, Mode.DUALPATH)


def ranks(tmp_path: Path, size: int) -> list[EmulatedSettings]:
    address = f"127.0.0.1:{claim_port()}"
    alone = alone_in(tmp_path)
    return [
        msgspec.structs.replace(alone, dp_size=size, dp_rank=rank, dp_address=address)
        for rank in range(size)
    ]


def test_all_ranks_agree_and_are_notified_when_one_ends(tmp_path, monkeypatch):
    ties: dict[int, list[object]] = {}
    watch = process._watch
    monkeypatch.setattr(
        process, "_watch", lambda held, lost: (ties.update({id(lost): held}), watch(held, lost))
    )
    found: list[GroupRank | None] = [None] * 3
    ended = [threading.Event() for _ in range(3)]
    callbacks = [event.set for event in ended]

    def come_up(rank: int) -> None:
        found[rank] = process.join_group(settings[rank], callbacks[rank], GUARD_S)

    settings = ranks(tmp_path, 3)
    threads = [threading.Thread(target=come_up, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GUARD_S)
    places = [place for place in found if place is not None]
    assert [(place.rank, place.size) for place in places] == [(0, 3), (1, 3), (2, 3)]
    assert len({place.start for place in places}) == 1
    # The process of rank 2 ends: its only connection closes, and rank 0 notifies the others.
    (tie,) = ties[id(callbacks[2])]
    tie.shutdown(2)  # type: ignore[attr-defined]
    assert all(event.wait(GUARD_S) for event in ended)


def test_a_rank_reports_that_the_others_did_not_start(tmp_path):
    for settings in ranks(tmp_path, 2):
        with pytest.raises(
            DeadlineError, match=r"of 2 could not connect to the others.*start all of them"
        ):
            process.join_group(settings, timeout_s=0.2)


def test_ranks_connect_despite_a_port_in_use_and_a_self_connection(tmp_path, monkeypatch):
    """A port that was free when it was chosen may since be in use by a connection."""
    settings = ranks(tmp_path, 2)
    port = int(settings[0].dp_address.rpartition(":")[2])
    taken = socket.create_server(("127.0.0.1", port))
    itself = socket.socket()
    itself.bind(("127.0.0.1", 0))
    itself.connect(itself.getsockname())
    first, connect = [itself], socket.create_connection
    monkeypatch.setattr(
        socket, "create_connection", lambda *a, **k: first.pop() if first else connect(*a, **k)
    )
    tries = threading.Event()
    found: list[GroupRank | None] = []

    def come_up(rank: int) -> None:
        found.append(process.join_group(settings[rank], lambda: None, GUARD_S))

    sleep = time.sleep

    def noted(seconds: float) -> None:
        tries.set()
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", noted)
    leader = threading.Thread(target=come_up, args=(0,))
    leader.start()
    assert tries.wait(GUARD_S)
    taken.close()
    come_up(1)
    leader.join(GUARD_S)
    assert sorted(place.rank for place in found if place is not None) == [0, 1]
    assert not first
    assert itself.fileno() == -1


def test_a_plain_engine_has_no_group(tmp_path):
    assert process.join_group(alone_in(tmp_path)) is None


async def test_a_campaign_starts_and_ends_ranks_together(tmp_path):
    settings = ChaosSettings(prefill=4, decode=3, prefill_dp=2)
    cluster = ChaosCluster(
        settings, LoadSettings(), EmulatedEngines(EmulatedEnginesSettings()), *2 * (tmp_path,)
    )
    assert cluster.group("pe-3") == ("pe-2", "pe-3")
    assert cluster.group("de-1") == ("de-1",)
    assert cluster.group("router-0") == ("router-0",)


async def test_a_campaign_restarts_engines_in_the_role_that_was_set(tmp_path):
    settings = ChaosSettings(prefill=4, decode=2, prefill_dp=2, front_ends=1)
    assert (settings.groups(Role.PREFILL), settings.groups(Role.DECODE)) == (2, 2)
    cluster = ChaosCluster(
        settings, LoadSettings(), EmulatedEngines(EmulatedEnginesSettings()), *2 * (tmp_path,)
    )
    assert cluster.names[2:4] == ("front-end-0", "pe-0")
    cluster.set_role("pe-3", Role.DECODE)
    assert cluster.current_roles == {"pe-2": Role.DECODE, "pe-3": Role.DECODE}
    cluster.set_role("pe-2", Role.PREFILL)
    assert cluster.current_roles == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefill": 3, "prefill_dp": 2}, "prefill is 3; it must be a multiple of prefill_dp, 2"),
        ({"front_ends": 1, "engines": EngineKind.VLLM}, "leave front_ends out"),
        ({"decode_dp": 2, "engines": EngineKind.VLLM}, "has no experts"),
    ],
)
def test_groups_that_a_campaign_does_not_support_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        ChaosSettings(**change).check()


def test_a_rank_beyond_its_group_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="dp_rank is 2 of 2"):
        msgspec.structs.replace(ranks(tmp_path, 2)[0], dp_rank=2).check()
