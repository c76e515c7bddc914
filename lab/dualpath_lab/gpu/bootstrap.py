"""Prepares a bare machine without a network for `gpu-check`, from the archive of ``payload``.

    python3 lab/dualpath_lab/gpu/bootstrap.py ARCHIVE FOLDER

It needs Python 3.12, torch with CUDA 13, and a checkout of the repository as the current folder;
it imports the standard library only.  The folder gets the packages of the archive, the metadata of
an installed dualpath, and ``environment.sh``, which a shell sources before `dualpath gpu-check`.
"""

import argparse
import shlex
import sys
import tarfile
import tomllib
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

#: vLLM looks for an address, reports usage and samples with FlashInfer unless these are set.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
#: Modules that the archive does not have and engines import, torchvision in vLLM's warm-up.
NEEDED = (
    "torch", "torchvision", "triton", "numpy", "transformers", "tokenizers", "safetensors", "PIL",
    "xxhash", "multidict", "anyio", "yaml", "regex", "psutil", "jinja2", "cloudpickle",
)  # fmt: skip
#: Folders of caches below the prepared one.
CACHES = {
    "DUALPATH_CACHE": "models",
    "VLLM_CACHE_ROOT": "cache",
    "XDG_CACHE_HOME": "cache",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}


def unpack(archive: Path, folder: Path) -> None:
    """Unpack the archive once; a folder that is complete is not changed."""
    complete = folder / "complete"
    if complete.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    complete.touch()


def write_metadata(project_file: Path, version_file: Path, site: Path) -> None:
    """Write what pip records of an installed project: name, version and entry points."""
    project: dict[str, Any] = tomllib.loads(project_file.read_text())["project"]
    version = version_file.read_text().split('__version__ = "')[1].split('"')[0]
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    info = site / f"{project['name'].replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n"
    (info / "METADATA").write_text(metadata)
    (info / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
            for group, entries in groups.items()
        )
    )


def write_command(folder: Path) -> None:
    """Write the command `dualpath`."""
    command = folder / "bin" / "dualpath"
    command.parent.mkdir(parents=True, exist_ok=True)
    command.write_text(
        f"#!{sys.executable}\nimport sys\n\nfrom dualpath.cli.main import main\n\n"
        'if __name__ == "__main__":\n    sys.exit(main())\n'
    )
    command.chmod(0o755)


def environment(folder: Path, repository: Path) -> str:
    """Return the lines of ``environment.sh``."""
    places = [folder / "site", folder / "metadata", repository / "src", repository / "lab"]
    variables = {**OFFLINE, **{name: str(folder / part) for name, part in CACHES.items()}}
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    lines.append(f"export PYTHONPATH={shlex.quote(':'.join(map(str, places)))}")
    lines.append(f"export PATH={shlex.quote(str(folder / 'bin'))}:$PATH")
    return "\n".join(lines) + "\n"


def prepare(archive: Path, folder: Path, repository: Path) -> None:
    """Prepare the folder."""
    unpack(archive, folder)
    for project, package in _projects(repository):
        write_metadata(project / "pyproject.toml", package / "__init__.py", folder / "metadata")
    write_command(folder)
    (folder / "environment.sh").write_text(environment(folder, repository))


def missing(folder: Path) -> list[str]:
    """Return the needed modules that neither this Python nor the archive has."""
    places = [str(folder / "site"), *sys.path]
    return [name for name in NEEDED if PathFinder.find_spec(name, places) is None]


def _projects(repository: Path) -> Iterable[tuple[Path, Path]]:
    """Yield the folder of each project and of its package with the version."""
    yield repository, repository / "src" / "dualpath"
    yield repository / "lab", repository / "lab" / "dualpath_lab"


def main() -> None:
    """Prepare the machine as the command line requests."""
    parser = argparse.ArgumentParser(
        prog="bootstrap.py", description="Prepare a bare machine without a network for gpu-check."
    )
    parser.add_argument("archive", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    folder = options.folder.absolute()
    prepare(options.archive, folder, Path.cwd())
    if absent := missing(folder):
        sys.exit(
            f"bootstrap.py: {sys.executable} has no {', '.join(absent)}; run it with the Python "
            "that has torch, or install them there"
        )
    print(f". {shlex.quote(str(folder / 'environment.sh'))} && dualpath gpu-check --out report")


if __name__ == "__main__":
    main()
