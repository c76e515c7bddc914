"""Results of phases as JSON files; a phase's findings are on the disk before the phase ends."""

from pathlib import Path
from typing import Any, Literal

import msgspec

from dualpath.node.output_files import write_whole
from dualpath.report.files import as_json
from dualpath_lab.gpu.settings import GpuCheckSettings

State = Literal["running", "ok", "failed", "timed out", "skipped"]


class PhaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a phase.

    ``found`` are its findings by name: a value, or a list of rows with the same columns.  A phase
    that fails keeps what it has found; ``reason`` and ``log_tail`` then explain the failure.
    """

    phase: str
    state: State
    seconds: float = 0.0
    limit_s: float = 0.0
    reason: str = ""
    log_tail: tuple[str, ...] = ()
    found: dict[str, Any] = {}

    @property
    def ok(self) -> bool:
        """Whether the phase has run to its end."""
        return self.state == "ok"


def result_file(out: Path, phase: str) -> Path:
    """Return the file of a phase's result."""
    return out / f"{phase}.json"


def write_result(out: Path, result: PhaseResult) -> None:
    """Replace the file of a phase's result atomically."""
    write_whole(result_file(out, result.phase), as_json(result))


def read_result(out: Path, phase: str) -> PhaseResult | None:
    """Return the result in a phase's file; None if there is none or it cannot be read."""
    try:
        return msgspec.json.decode(result_file(out, phase).read_bytes(), type=PhaseResult)
    except (OSError, msgspec.MsgspecError):
        return None


class Check:
    """What a phase gets: the settings, a folder for its logs, and ``put`` for its findings."""

    def __init__(self, phase: str, settings: GpuCheckSettings, out: Path) -> None:
        self.phase = phase
        self.settings = settings
        self.out = out
        self.logs = out / "logs" / phase
        self.found: dict[str, Any] = {}
        self.logs.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, value: object) -> None:
        """Add or replace a finding, on the disk as well."""
        self.found[name] = value
        write_result(self.out, PhaseResult(phase=self.phase, state="running", found=self.found))

    @property
    def device(self) -> str:
        """Torch's name of the device that a phase of one process uses."""
        return "cuda" if self.settings.on_gpus else "cpu"
