"""A process under test: `dualpath emulate` with failpoints, and with a disk that may be faulty.

python -m dualpath.laboratory.chaos.victim '{"socket": ...}' prefill --model ...
"""

import os
import random
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from dualpath.laboratory.chaos.bad_disk import FaultyDisk
from dualpath.laboratory.chaos.gate import FailpointClient
from dualpath.laboratory.chaos.matrix import Component, follower_name
from dualpath.laboratory.chaos.points import FAILPOINTS, EngineKind, install_failpoints
from dualpath.laboratory.chaos.tally import BlockCounter
from dualpath.laboratory.emulated.rank_connections import ConnectedFollower, Connection
from dualpath.ops.launch.commands import ENGINE_ENTRY, ROUTER_ENTRY
from dualpath.ops.launch.forked_engine import prepare_engine, run_entry
from dualpath.storage.contract import ReadOutcome
from dualpath.storage.remembering import LookupCachingStorage

#: The entry point of a process under test.
ENTRY = "dualpath.laboratory.chaos.victim:main"


class ProcessSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a process under test: its name, the campaign's socket, where it counts blocks.

    The campaign arms its failpoints under ``failpoint_name``.  ``tallies`` is the folder of block
    counts; paths are absolute.
    """

    process: str
    failpoint_name: str
    kind: EngineKind
    component: Component
    socket: str
    tallies: str
    seed: int

    def argument(self) -> str:
        """Encode it as the first argument of the process."""
        return msgspec.json.encode(self).decode()


def prepare(settings: ProcessSettings) -> None:
    """Connect to the campaign and install the failpoints of this process."""
    failpoints = FailpointClient(Path(settings.socket), settings.failpoint_name)
    points = FAILPOINTS[settings.kind]
    parts = [component for component in points if component.failure_domain is settings.component]
    for component in parts:
        install_failpoints(points[component], failpoints.reached)
    if settings.kind is EngineKind.EMULATED and settings.component.is_engine:
        _rename_ranks(failpoints, settings.failpoint_name)
    if settings.component.is_engine:
        _count_loads(BlockCounter(Path(settings.tallies) / f"{settings.process}-{os.getpid()}"))
        chance = random.Random(f"{settings.seed} {settings.process}")
        FaultyDisk(
            lambda: failpoints.disk, failpoints.reached, failpoints.expects, chance
        ).install()


def _rename_ranks(failpoints: FailpointClient, engine: str) -> None:
    begin = ConnectedFollower.__init__

    def named(self: ConnectedFollower, rank: int, size: int, connection: Connection) -> None:
        begin(self, rank, size, connection)
        failpoints.rename(follower_name(engine, rank))

    ConnectedFollower.__init__ = named  # type: ignore[assignment, method-assign]


def _count_loads(tally: BlockCounter) -> None:
    # Counts blocks that an engine gets; look-ups that find nothing are not counted.
    read = LookupCachingStorage.read

    def counted(
        self: LookupCachingStorage, key: bytes, destination: memoryview, *, whole: bool = True
    ) -> ReadOutcome:
        outcome = read(self, key, destination, whole=whole)
        tally.add(good=outcome.is_good)
        return outcome

    LookupCachingStorage.read = counted  # type: ignore[method-assign]


def main() -> NoReturn:
    """Run the command after the first argument, with the failpoints installed."""
    settings = msgspec.json.decode(sys.argv.pop(1), type=ProcessSettings)
    is_vllm_engine = settings.kind is EngineKind.VLLM and settings.component.is_engine
    if is_vllm_engine:
        prepare_engine()
    prepare(settings)
    run_entry(ENGINE_ENTRY if is_vllm_engine else ROUTER_ENTRY, sys.argv[1:])
