"""The Compose files match the commands and settings of this version, and contain no secrets."""

import os
import re
import shlex
from pathlib import Path

import pytest
import yaml
from tests.unit.test_docs_snippets import refused

from dualpath.cli.settings import SECTIONS
from dualpath.core.modes import Mode
from dualpath.core.settings import OTHER_VARIABLES, from_environment
from dualpath.launch.commands import ENGINE_ENVIRONMENT
from dualpath.router.settings import RouterSettings

FOLDER = Path(__file__).parents[2] / "deploy" / "compose"
FILES = sorted(FOLDER.glob("*.yaml"))
#: Used together with another file.
ADDED = ("cpu.yaml", "gpu.yaml")
CLUSTERS = [file for file in FILES if file.name not in ADDED]
#: `${NAME:-default}` and `${NAME:?what to give}`.
VARIABLE = re.compile(r"\$\{(\w+):([-?])([^}]*)\}")
GIVEN = {"DUALPATH_CLUSTER_SECRET": "5" * 64, "DUALPATH_ENGINE_KEY": "k", "DUALPATH_MODEL": "/m"}


def services(file):
    """Name and settings of each container, as Compose reads the file."""

    def value(found):
        name, kind, text = found.groups()
        assert kind == "-" or name in GIVEN, f"{name} has no default and is not among {set(GIVEN)}"
        return GIVEN.get(name, text)

    return yaml.safe_load(VARIABLE.sub(value, file.read_text()))["services"]


def named(file):
    return file.name


@pytest.mark.parametrize("file", CLUSTERS, ids=named)
def test_every_command_is_accepted_by_its_parser(file):
    for name, service in services(file).items():
        words = shlex.split(service["command"])
        assert words[0] != "dualpath" or not refused(words), f"{name}: {' '.join(words)}"


@pytest.mark.parametrize("file", CLUSTERS, ids=named)
def test_every_variable_is_a_setting_of_this_version(file):
    for service in services(file).values():
        environment = service["environment"]
        ours = {name: value for name, value in environment.items() if name.startswith("DUALPATH_")}
        # Without a value it is the shell's, where it is set there.
        settings = {name: ours[name] or "the-shell-s" for name in ours.keys() - OTHER_VARIABLES}
        assert len(from_environment(SECTIONS, settings)) == len(settings)


@pytest.mark.parametrize("file", CLUSTERS, ids=named)
def test_only_the_router_is_published_and_only_to_this_machine(file):
    for name, service in services(file).items():
        published = service.get("ports", [])
        assert (name == "router") == bool(published), name
        assert all(port.startswith("127.0.0.1:") for port in published)


@pytest.mark.parametrize("file", CLUSTERS, ids=named)
def test_secrets_come_from_outside_and_have_no_default(file):
    secrets = [found for found in VARIABLE.finditer(file.read_text()) if "SECRET" in found[1]]
    assert secrets
    assert all(found[2] == "?" for found in secrets)


@pytest.mark.parametrize("file", FILES, ids=named)
def test_no_default_is_empty(file):
    # podman-compose 1.0.3, which is Debian's, hands `${NAME:-}` on as it stands.
    defaults = [found[3] for found in VARIABLE.finditer(file.read_text()) if found[2] == "-"]
    assert all(defaults)


@pytest.mark.parametrize("file", CLUSTERS, ids=named)
def test_containers_may_drain_before_they_are_killed(file):
    drain_s = RouterSettings(mode=Mode.DUALPATH, control_port=0).drain_timeout_s
    for name, service in services(file).items():
        assert int(service["stop_grace_period"].removesuffix("s")) > drain_s, name


@pytest.mark.parametrize("name", ADDED)
def test_files_used_with_the_vllm_file_change_its_engines(name):
    added = set(yaml.safe_load((FOLDER / name).read_text())["services"])
    assert added == set(services(FOLDER / "vllm.yaml")) - {"router"}


def test_engines_on_cpus_have_the_variables_of_serve():
    for service in yaml.safe_load((FOLDER / "cpu.yaml").read_text())["services"].values():
        assert service["environment"].items() <= ENGINE_ENVIRONMENT.items()


def test_the_health_check_can_be_executed():
    assert os.access(FOLDER.parent / "containers" / "healthy", os.X_OK)
