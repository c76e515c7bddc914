"""A process of a campaign: `dualpath emulate`, whose steps are watched and whose disk may be bad.

python -m dualpath.laboratory.chaos.victim '{"socket": ...}' prefill --model ...
"""

import os
import random
import runpy
import sys
from pathlib import Path

import msgspec

from dualpath.laboratory.chaos.bad_disk import BadDisk
from dualpath.laboratory.chaos.gate import Gate
from dualpath.laboratory.chaos.matrix import Component
from dualpath.laboratory.chaos.points import EMULATED, watch_points
from dualpath.laboratory.chaos.tally import Tally
from dualpath.storage import directory, posix
from dualpath.storage.contract import ReadOutcome


class VictimSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a process of a campaign is told: who it is, where the campaign listens, where it counts.

    ``tallies`` is a folder; paths are absolute.
    """

    process: str
    component: Component
    socket: str
    tallies: str
    seed: int

    def argument(self) -> str:
        """Return it as the first argument of the process."""
        return msgspec.json.encode(self).decode()


def prepare(settings: VictimSettings) -> None:
    """Connect to the campaign and let the code of this process be watched."""
    gate = Gate(Path(settings.socket), settings.process)
    watch_points(EMULATED[settings.component], gate.reached)
    if settings.component is not Component.ROUTER:
        _count_loads(Tally(Path(settings.tallies) / f"{settings.process}-{os.getpid()}"))
        chance = random.Random(f"{settings.seed} {settings.process}")
        disk = BadDisk(lambda: gate.disk, gate.reached, gate.expects, chance)
        disk.install(posix, directory)


def _count_loads(tally: Tally) -> None:
    read = posix.PosixStorage.read

    def counted(self: posix.PosixStorage, key: bytes, destination: memoryview) -> ReadOutcome:
        outcome = read(self, key, destination)
        tally.add(good=outcome.is_good)
        return outcome

    posix.PosixStorage.read = counted  # type: ignore[method-assign]


if __name__ == "__main__":
    prepare(msgspec.json.decode(sys.argv[1], type=VictimSettings))
    sys.argv[:2] = ["dualpath", "emulate"]
    # By its name: the laboratory stands below the commands.
    runpy.run_module("dualpath.cli.main", run_name="__main__", alter_sys=True)
