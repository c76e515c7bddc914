"""Runs one phase in this process: `python -m dualpath_lab.gpu.phase NAME OUT`."""

import importlib
import os
import sys
from pathlib import Path

import msgspec

from dualpath.cli.main import configure_logging
from dualpath.cli.signals import sigterm_as_interrupt
from dualpath_lab.gpu.results import Check
from dualpath_lab.gpu.settings import PHASES, GpuCheckSettings, PhaseName

SETTINGS_FILE = "settings.json"


def run(name: PhaseName, out: Path) -> None:
    """Run a phase with the settings in the folder ``out``; its findings are written there."""
    settings = msgspec.json.decode((out / SETTINGS_FILE).read_bytes(), type=GpuCheckSettings)
    module, _, function = PHASES[name].function.partition(":")
    with sigterm_as_interrupt():
        getattr(importlib.import_module(module), function)(Check(name, settings, out))


if __name__ == "__main__":
    configure_logging()
    run(sys.argv[1], Path(sys.argv[2]))  # type: ignore[arg-type]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # Threads of engines and of NIXL may still run.
