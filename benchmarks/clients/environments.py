"""A separate virtual environment for every client, as their dependencies conflict."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

#: Read only by pip; its value is passed on to uv.
_FIND_LINKS = "PIP_FIND_LINKS"


class Package(NamedTuple):
    """A client on a package index.

    ``python`` is the oldest Python on which its code runs; ``asks_for_newer``: its metadata
    requires a newer one.  ``additional`` are packages that it imports without requiring them.
    """

    name: str
    version: str
    python: tuple[int, int] = (3, 10)
    asks_for_newer: bool = False
    additional: tuple[str, ...] = ()


class NotRunnable(Exception):
    """A client that cannot be run on this machine, and why."""


def environment(package: Package, folder: Path) -> Path:
    """Return the folder with the programs of ``package``; install it on the first call.

    Raises ``NotRunnable`` without a Python that is new enough, and ``CalledProcessError`` if the
    package cannot be installed.
    """
    place = folder / package.name
    stamp = place / f".{package.version}"
    if not stamp.exists():
        _uv("venv", "--quiet", "--clear", "--python", _interpreter(package), str(place))
        _install(package, place / "bin" / "python")
        stamp.touch()
    return place / "bin"


def _interpreter(package: Package) -> str:
    if sys.version_info >= package.python:
        return sys.executable
    wanted = ".".join(map(str, package.python))
    sought = ("python", "find", "--no-python-downloads", f">={wanted}")
    found = _uv(*sought, variables=_all_of_pyenv(), check=False)
    if found.returncode:
        raise NotRunnable(f"needs Python {wanted}; `uv python install {wanted}` would install it")
    return found.stdout.strip()


def _all_of_pyenv() -> dict[str, str]:
    """Return the variable with which all `python3.N` of pyenv work; a failing one would stop uv."""
    if (pyenv := shutil.which("pyenv")) is None:
        return {}
    listed = subprocess.run([pyenv, "versions", "--bare"], check=True, capture_output=True)
    return {"PYENV_VERSION": ":".join(listed.stdout.decode().split())}


def _install(package: Package, python: Path) -> None:
    into = ("pip", "install", "--quiet", "--python", str(python))
    client = f"{package.name}=={package.version}"
    if not package.asks_for_newer:
        _uv(*into, client, *package.additional)
        return
    # Only pip can install on an older Python than required; as it would also choose dependencies
    # for the newer one, uv installs those.
    _uv(*into, "pip")
    pip = (str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-requires-python")
    subprocess.run([*pip, client], check=True)
    read = f"import importlib.metadata as m; print('\\n'.join(m.requires({package.name!r}) or []))"
    listed = subprocess.run([str(python), "-c", read], check=True, capture_output=True, text=True)
    needed = [line for line in listed.stdout.splitlines() if not re.search(r";.*\bextra\b", line)]
    _uv(*into, *needed, *package.additional)


def _uv(
    *arguments: str, variables: Mapping[str, str] | None = None, check: bool = True
) -> "subprocess.CompletedProcess[str]":
    environ = {**os.environ, **(variables or {})}
    if links := environ.get(_FIND_LINKS):
        environ.setdefault("UV_FIND_LINKS", ",".join(shlex.split(links)))
    command = [sys.executable, "-m", "uv", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done
