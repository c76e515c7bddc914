"""The isolation experiment on a lab: bytes use the lane of their case, the lab is removed."""

import os

import msgspec
import pytest
from tests.e2e.test_lab_network import classes

from dualpath.core.errors import ConfigError
from dualpath.plan.traffic_class import INFERENCE_CLASS, KV_CLASS
from dualpath.transport.nixl import nixl_package
from dualpath_lab.experiments.isolation import ISOLATION, draw
from dualpath_lab.experiments.isolation_settings import Case, IsolationSettings, Leg
from dualpath_lab.nodes.cluster import lab_status
from dualpath_lab.nodes.machine import find_machine, find_remains, prefix
from dualpath_lab.nodes.settings import Shaping
from dualpath_lab.nodes.steps import CNIC
from dualpath_sim.harness.run import measure

NAME = f"iso{os.getpid()}"
#: An upper bound of all bytes besides the bulk: messages, replies, connections.
BULK_BYTES = 1 << 20
SETTINGS = IsolationSettings(
    nodes="1P1D",
    message_bytes=(4096,),
    rounds=3,
    least_run_s=0.0,
    repeat=1,
    block_bytes=16 << 10,
    blocks=64,
    settle_s=0.0,
    most_busy=1.0,
    lab=NAME,
)


def refusal() -> str:
    """Return why this machine and user cannot have the lab, empty if they can."""
    pytest.importorskip(nixl_package())
    try:
        shaping = find_machine(SETTINGS.lab_settings).shaping
    except ConfigError as error:
        return str(error)
    return "nobody shapes links" if shaping is Shaping.TOKEN_BUCKETS else ""


needs_lab = pytest.mark.skipif(bool(refusal()), reason=f"lab: {refusal()}")


class Lanes:
    """Bytes that the source of the bulk has sent by lane, sampled after every run."""

    def __init__(self) -> None:
        self.seen: list[dict[str, int]] = []

    def look(self, line: str) -> None:
        device = "lo" if Leg.LOOPBACK.value in line else CNIC
        sent = classes(lab_status(NAME), f"{prefix(NAME)}de0", device)
        self.seen.append({lane: sent[lane]["sent"] for lane in (INFERENCE_CLASS, KV_CLASS)})


@needs_lab
@pytest.mark.nixl
@pytest.mark.parametrize("leg", list(Leg))
def test_bulk_delays_inference_only_without_qos(leg: Leg) -> None:
    lanes = Lanes()
    settings = msgspec.structs.replace(SETTINGS, legs=(leg,))
    raw = measure(ISOLATION, settings, lanes.look)
    alone, no_qos, qos = lanes.seen
    assert 0 < alone[INFERENCE_CLASS] < BULK_BYTES
    assert no_qos[INFERENCE_CLASS] - alone[INFERENCE_CLASS] > BULK_BYTES
    assert alone[KV_CLASS] == no_qos[KV_CLASS] == 0
    assert qos[KV_CLASS] > BULK_BYTES
    assert [run.case for run in raw.results] == list(Case)
    assert all(run.rounds > 0 for run in raw.results)
    assert draw(raw).results[-1].met
    assert [run.checked_blocks for run in raw.results[1:]] == [
        settings.blocks * settings.in_flight * (1 if leg is Leg.CNIC else 2)
    ] * 2
    assert find_remains(NAME).is_empty


@needs_lab
def test_the_lab_of_an_interrupted_experiment_is_removed() -> None:
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(ISOLATION, SETTINGS, interrupt)
    assert find_remains(NAME).is_empty
