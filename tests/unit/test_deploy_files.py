"""The chart has real copies of what it ships, and no file of the repository is a link's text."""

import subprocess
from pathlib import Path

import pytest
from tests.guard import GUARD_S

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "src" / "dualpath" / "router" / "observe" / "monitoring"
#: Helm reads nothing outside a chart, so that it has copies.
COPIES = sorted((ROOT / "deploy" / "helm" / "dualpath" / "files").iterdir())
#: Longer than any path that a link of ours would hold.
LONGEST_PATH_BYTES = 300


def is_text_of_a_link(file: Path) -> bool:
    """Whether a plain file holds but a path that leads somewhere from its folder."""
    if file.is_symlink() or not file.is_file() or file.stat().st_size > LONGEST_PATH_BYTES:
        return False
    try:
        path = file.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError:
        return False
    return (
        "/" in path and not any(mark in path for mark in "\n\0") and (file.parent / path).exists()
    )


@pytest.mark.parametrize("copy", COPIES, ids=lambda copy: copy.name)
def test_the_chart_ships_what_the_package_has(copy: Path) -> None:
    original = MONITORING / copy.name
    assert copy.read_bytes() == original.read_bytes(), (
        f"cp {original.relative_to(ROOT)} {copy.relative_to(ROOT)}"
    )


def test_the_chart_ships_alerts_and_dashboard() -> None:
    assert [copy.name for copy in COPIES] == ["alerts.yaml", "grafana.json"]


def test_no_file_of_the_repository_is_the_text_of_a_link() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, timeout=GUARD_S, check=True
    )
    tracked = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    assert len(tracked) > 100
    assert [str(file.relative_to(ROOT)) for file in tracked if is_text_of_a_link(file)] == []
