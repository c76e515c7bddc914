"""The systemd units and the Slurm script match the commands of this version."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from tests.guard import GUARD_S
from tests.unit.test_docs_snippets import refused

from dualpath.core.modes import Mode
from dualpath.router.settings import RouterSettings

DEPLOY = Path(__file__).parents[2] / "deploy"
SCRIPT = DEPLOY / "slurm" / "dualpath.sbatch"
SERVICES = sorted((DEPLOY / "systemd").glob("*.service"))


def keys(unit):
    """Key and value of each line of a unit; lines that end in a backslash go on."""
    text = unit.read_text().replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for key, value in re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE):
        found.setdefault(key, []).append(value)
    return found


def drain_s():
    return RouterSettings(mode=Mode.DUALPATH, control_port=0).drain_timeout_s


def test_the_router_s_command_is_accepted_by_its_parser():
    (command,) = keys(DEPLOY / "systemd" / "dualpath-router@.service")["ExecStart"]
    program, *words = shlex.split(command)
    assert program.endswith("/bin/dualpath")
    assert not refused(["dualpath", *words])


@pytest.mark.parametrize("unit", SERVICES, ids=lambda unit: unit.name)
def test_a_unit_may_drain_before_it_is_killed_and_is_restarted(unit):
    sections = keys(unit)
    assert int(*sections["TimeoutStopSec"]) > drain_s()
    assert sections["Restart"] == ["always"]


@pytest.mark.parametrize("unit", SERVICES, ids=lambda unit: unit.name)
def test_no_unit_runs_as_root_or_contains_a_secret(unit):
    sections = keys(unit)
    assert sections["User"] == ["dualpath"]
    assert not [value for value in sections["Environment"] if "SECRET" in value or "KEY" in value]


def test_sigterm_reaches_only_an_engine_s_server():
    assert keys(DEPLOY / "systemd" / "dualpath-engine@.service")["KillMode"] == ["mixed"]


def run_script(tmp_path, **environment):
    return subprocess.run(
        ["bash", str(SCRIPT)],
        env={"PATH": "/usr/bin:/bin", **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=GUARD_S,
        check=False,
    )


def test_the_slurm_script_names_missing_variables(tmp_path):
    run = run_script(tmp_path, SLURM_NTASKS="2", STORAGE="kv")
    assert run.returncode != 0
    assert "MODEL: folder or name of the model" in run.stderr


def test_the_slurm_script_refuses_a_cluster_that_lacks_a_role(tmp_path):
    run = run_script(tmp_path, SLURM_NTASKS="2", STORAGE="kv", MODEL="m", PREFILL="2")
    assert run.returncode == 2
    assert "PREFILL is 2 of 2 tasks" in run.stderr
    assert "--ntasks of at least 3" in run.stderr


def test_the_slurm_script_leaves_time_for_a_drain():
    (seconds,) = re.findall(r"^#SBATCH --signal=B:TERM@(\d+)$", SCRIPT.read_text(), re.MULTILINE)
    assert int(seconds) > drain_s()
