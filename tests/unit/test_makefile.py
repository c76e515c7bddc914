"""make looks for what no package brings before it installs for minutes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.guard import GUARD_S

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="libnuma is Linux's")


def make(*words):
    """Run make in the repository with an environment of no variables but the path."""
    return subprocess.run(
        ["make", *words],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=GUARD_S,
        check=False,
    )


def looked_for(library, venv):
    """What `make install` says and does up to the point at which ``venv`` would be filled."""
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    return make("--no-print-directory", "libraries", f"LIBNUMA={library}", f"VENV={venv}")


def test_without_libnuma_make_names_the_package_that_has_it(tmp_path):
    made = looked_for("libabsent.so.1", tmp_path / "venv")
    assert made.returncode == 2
    assert "make: no libabsent.so.1 found; vLLM's CPU build needs it" in made.stderr
    assert "apt-get install libnuma1" in made.stderr
