"""A process of a campaign: `dualpath emulate`, whose steps are watched and whose disk may be bad.

python -m dualpath.laboratory.chaos.victim '{"socket": ...}' prefill --model ...
"""

import os
import random
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from dualpath.laboratory.chaos.bad_disk import BadDisk
from dualpath.laboratory.chaos.gate import Gate
from dualpath.laboratory.chaos.matrix import Component, follower_name
from dualpath.laboratory.chaos.points import POINTS, EngineKind, watch_points
from dualpath.laboratory.chaos.tally import Tally
from dualpath.laboratory.emulated.rank_connections import ConnectedFollower, Connection
from dualpath.ops.launch.commands import ENGINE_ENTRY, ROUTER_ENTRY
from dualpath.ops.launch.forked_engine import prepare_engine, run_entry
from dualpath.storage.contract import ReadOutcome
from dualpath.storage.remembering import RememberingStorage

#: As a process is told what to run.
ENTRY = "dualpath.laboratory.chaos.victim:main"


class VictimSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a process of a campaign is told: who it is, where the campaign listens, where it counts.

    ``passes_as`` is the name under which the campaign arms its steps.  ``tallies`` is a folder;
    paths are absolute.
    """

    process: str
    passes_as: str
    kind: EngineKind
    component: Component
    socket: str
    tallies: str
    seed: int

    def argument(self) -> str:
        """Return it as the first argument of the process."""
        return msgspec.json.encode(self).decode()


def prepare(settings: VictimSettings) -> None:
    """Connect to the campaign and let the code of this process be watched."""
    gate = Gate(Path(settings.socket), settings.passes_as)
    points = POINTS[settings.kind]
    parts = [component for component in points if component.whole is settings.component]
    for component in parts:
        watch_points(points[component], gate.reached)
    if settings.kind is EngineKind.EMULATED and settings.component.is_engine:
        _name_ranks(gate, settings.passes_as)
    if settings.component.is_engine:
        _count_loads(Tally(Path(settings.tallies) / f"{settings.process}-{os.getpid()}"))
        chance = random.Random(f"{settings.seed} {settings.process}")
        BadDisk(lambda: gate.disk, gate.reached, gate.expects, chance).install()


def _name_ranks(gate: Gate, engine: str) -> None:
    begin = ConnectedFollower.__init__

    def named(self: ConnectedFollower, rank: int, size: int, connection: Connection) -> None:
        begin(self, rank, size, connection)
        gate.rename(follower_name(engine, rank))

    ConnectedFollower.__init__ = named  # type: ignore[assignment, method-assign]


def _count_loads(tally: Tally) -> None:
    # What an engine is given: where it was looked for before, and not found, does not count.
    read = RememberingStorage.read

    def counted(
        self: RememberingStorage, key: bytes, destination: memoryview, *, whole: bool = True
    ) -> ReadOutcome:
        outcome = read(self, key, destination, whole=whole)
        tally.add(good=outcome.is_good)
        return outcome

    RememberingStorage.read = counted  # type: ignore[method-assign]


def main() -> NoReturn:
    """Run the command behind the first argument in a process that is prepared."""
    settings = msgspec.json.decode(sys.argv.pop(1), type=VictimSettings)
    is_vllm_engine = settings.kind is EngineKind.VLLM and settings.component.is_engine
    if is_vllm_engine:
        prepare_engine()
    prepare(settings)
    run_entry(ENGINE_ENTRY if is_vllm_engine else ROUTER_ENTRY, sys.argv[1:])
