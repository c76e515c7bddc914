"""Makes a Python environment with vLLM's CUDA build and an emulated GPU.

    python -m dualpath_lab.gpu.emulation.environment FOLDER

The packages are those of the running environment, which has vLLM's CPU build, by symbolic links;
vLLM is replaced with the CUDA build that ``payload`` packs for bare machines, and Triton is added.
pip downloads both, some 530 MB.  Processes of this environment have one emulated GPU each.
"""

import argparse
import platform
import shlex
import sys
import sysconfig
import venv
from pathlib import Path

import dualpath
import dualpath_lab
from dualpath_lab.gpu import bootstrap, payload

#: The interpreter of this version runs the kernels of vLLM 0.32.0.
TRITON = "triton==3.7.0"
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
#: Replaced packages, compiled files, and what editable installations write.
_NOT_LINKED = ("vllm", "triton", "__pycache__", "__editable__")
_START = "import dualpath_lab.gpu.emulation.fake_gpu as fake_gpu; fake_gpu.install()"


def make(folder: Path, wheels: Path) -> Path:
    """Make the environment and return its interpreter; pip downloads into ``wheels``.

    Raises ``subprocess.CalledProcessError`` if pip does not find a wheel.
    """
    vllm = next(one for one in payload.requirements() if one.startswith("vllm=="))
    found = payload.download(wheels, (vllm, TRITON), _PYTHON)
    venv.EnvBuilder(symlinks=True, clear=True).create(folder)
    site = folder / "lib" / f"python{_PYTHON}" / "site-packages"
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not entry.name.startswith(_NOT_LINKED) and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)
    for wheel in found:
        payload.unpack(wheel, site)
    sources = [str(Path(package.__path__[0]).parent) for package in (dualpath, dualpath_lab)]
    (site / "emulated_gpu.pth").write_text("\n".join([*sources, _START]) + "\n")
    return folder / "bin" / "python"


def variables(folder: Path) -> dict[str, str]:
    """Return the variables of processes in the environment: no network, caches in ``folder``."""
    caches = {name: str(folder / part) for name, part in bootstrap.CACHES.items()}
    return {**bootstrap.OFFLINE, **caches}


def refusal() -> str:
    """Return why the environment cannot be made on this machine; empty if it can."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return f"vLLM's CUDA wheel is for Linux on x86-64, not {sys.platform} {platform.machine()}"
    import torch

    if torch.version.cuda is not None:
        return "torch is a CUDA build; the emulation needs the one of vLLM's CPU build"
    return ""


def main() -> None:
    """Make the environment as the command line requests."""
    parser = argparse.ArgumentParser(
        prog="python -m dualpath_lab.gpu.emulation.environment",
        description="Make an environment with vLLM's CUDA build and an emulated GPU.",
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.absolute()
    if found := refusal():
        sys.exit(found)
    python = make(folder / "environment", folder / "wheels")
    words = [f"{name}={shlex.quote(value)}" for name, value in variables(folder).items()]
    command = "-m dualpath.cli.main gpu-check --rehearse --devices 0,0 --phases plain,pair"
    print(*words, python, command, "--out report")


if __name__ == "__main__":
    main()
