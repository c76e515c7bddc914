"""Settings of `dualpath gpu-check`, its phases, and the sizes of what they run."""

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.core.settings import Setting, Settings
from dualpath.launch.devices import usable_devices

PhaseName = Literal["facts", "libs", "plain", "pair", "nixl", "jct", "bench"]

_DEVICE_FILES = Path("/dev")


class Phase(NamedTuple):
    """One phase: its function as "module:function", its time limit, whether it needs a GPU."""

    function: str
    limit_s: float
    needs_gpu: bool = True


#: The phases in the order of their runs: ``pair`` compares with the answers of ``plain``.
PHASES: dict[PhaseName, Phase] = {
    "facts": Phase("dualpath_lab.gpu.facts:facts", 120, needs_gpu=False),
    "libs": Phase("dualpath_lab.gpu.libs:libs", 120, needs_gpu=False),
    "plain": Phase("dualpath_lab.gpu.plain:plain", 240),
    "pair": Phase("dualpath_lab.gpu.pair:pair", 300),
    "nixl": Phase("dualpath_lab.gpu.nixl:nixl", 150),
    "jct": Phase("dualpath_lab.gpu.jct:jct", 600),
    "bench": Phase("dualpath_lab.gpu.bench:bench", 300),
}


class Sizes(NamedTuple):
    """The sizes of prompts, answers and agents.

    ``turn_tokens`` is the length of an answer that is continued, with at least one full block.
    """

    prompt_tokens: tuple[int, ...]
    answer_tokens: int
    decode_tokens: int
    turn_tokens: int
    agents: int
    turns: int
    context_tokens: int
    pair_pieces: int
    pinned_bytes: tuple[int, ...]


_FULL = Sizes((1000, 4100, 16000), 32, 256, 256, 6, 4, 8000, 128, (1 << 30, 4 << 30, 16 << 30))
_TINY = Sizes((130, 700), 8, 24, 70, 2, 2, 400, 8, ())


class GpuCheckSettings(Settings, frozen=True, kw_only=True):
    """What is checked, and with which model and memory."""

    phases: Annotated[tuple[PhaseName, ...], Setting("phases to run, in this order")] = tuple(
        PHASES
    )
    limit_s: Annotated[
        float, Setting("time limit of each phase; 0: the phase's own, 120 to 600 s", ge=0)
    ] = 0.0
    model: Annotated[
        str,
        Setting(
            "model of the engines; empty: 16 layers of Llama-3.1-8B's shape with random weights",
            metavar="MODEL",
        ),
    ] = ""
    devices: Annotated[
        tuple[str, ...],
        Setting(
            "GPUs of prefill and decode engine; empty: the first two, or twice the only one",
            metavar="GPU,GPU",
        ),
    ] = ()
    storage: Annotated[
        str,
        Setting(
            "folder in which the clusters make and remove their storage; empty: in --out",
            metavar="DIR",
        ),
    ] = ""
    dtype: Annotated[str, Setting("vLLM's --dtype of all engines", metavar="TYPE")] = "float16"
    max_model_len: Annotated[int, Setting("longest context in tokens", ge=2048)] = 32768
    hbm_bytes: Annotated[int, Setting("KV memory of each engine on its GPU", ge=1)] = 16 << 30
    buffer_bytes: Annotated[int, Setting("DRAM buffer of each engine", ge=1)] = 8 << 30
    snic_bytes_per_s: Annotated[
        float, Setting("rate of storage reads of each engine in `jct`", gt=0)
    ] = 1e9
    modes: Annotated[tuple[Mode, ...], Setting("modes that `jct` compares")] = (
        Mode.BASIC,
        Mode.SPLIT,
        Mode.ORACLE,
    )
    start_timeout_s: Annotated[
        float, Setting("how long a cluster of a phase may take to start", gt=0)
    ] = 150.0
    rehearse: Annotated[
        bool,
        Setting(
            "tiny sizes, to try the programs: their times mean nothing; on CPUs unless devices are "
            "given"
        ),
    ] = False

    def check(self) -> None:
        """Raise ``ConfigError`` for devices that are not one for each engine."""
        if self.devices and len(self.devices) != 2:
            raise ConfigError(
                f"{{devices}} is {','.join(self.devices)}; name two, of the prefill and of the "
                "decode engine, which may be the same"
            )

    @property
    def sizes(self) -> Sizes:
        """The sizes of what the phases run."""
        return _TINY if self.rehearse else _FULL

    @property
    def on_gpus(self) -> bool:
        """Whether the phases use GPUs: all runs do but a rehearsal without devices."""
        return not self.rehearse or bool(self.devices)

    def limit(self, name: PhaseName) -> float:
        """Return the time limit of a phase in seconds."""
        return self.limit_s or PHASES[name].limit_s

    def for_rehearsal(self) -> "GpuCheckSettings":
        """Return the settings with memory and types that a CPU has."""
        return msgspec.structs.replace(
            self,
            dtype=self.dtype if self.on_gpus else "float32",
            max_model_len=3072,
            hbm_bytes=128 << 20,
            buffer_bytes=256 << 20,
        )


def gpus(asked: tuple[str, ...] = (), device_files: Path = _DEVICE_FILES) -> tuple[str, ...]:
    """Return the GPUs of this machine: the ``asked`` ones, else the visible ones, else all.

    A container may have the devices without the driver's folder in ``/proc``.
    """
    found = usable_devices(asked, cpu_build=False)
    files = device_files.glob("nvidia[0-9]*")
    return found or tuple(sorted(file.name.removeprefix("nvidia") for file in files))


def engine_devices(settings: GpuCheckSettings) -> tuple[str, ...]:
    """Return the GPUs of the prefill and of the decode engine; none on CPUs."""
    if not settings.on_gpus:
        return ()
    found = gpus(settings.devices)
    return (found[0], found[1 if len(found) > 1 else 0]) if found else ()
