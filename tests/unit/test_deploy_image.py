"""The image is built from a few files: all that the package needs, and none ignored."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Inputs of both wheels: build settings, description, licence and code.
NEEDED = {"pyproject.toml", "setup.py", "README.md", "LICENSE", "src", "lab"}


def copied() -> list[str]:
    """Return what the Containerfile copies out of the repository."""
    lines = (ROOT / "deploy" / "containers" / "Containerfile").read_text().splitlines()
    found = [line.split()[1:-1] for line in lines if line.startswith("COPY ")]
    from_here = [words for words in found if not words[0].startswith("--from")]
    return [word for words in from_here for word in words if not word.startswith("--")]


def test_the_package_can_be_built_from_the_copied_files() -> None:
    assert set(copied()) >= NEEDED
    assert all((ROOT / name).exists() for name in copied())


def test_the_image_of_emulated_engines_has_the_lab() -> None:
    text = (ROOT / "deploy" / "containers" / "Containerfile").read_text()
    (emulated,) = (line for line in text.splitlines() if "none) set --" in line)
    assert "./lab" in emulated.split()


def test_copied_files_are_not_ignored() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    let_through = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines
    assert set(copied()) <= let_through
