"""The archive for a bare machine, and what its bootstrap writes, with small wheels."""

import json
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dualpath_lab.gpu import bootstrap, payload

REPOSITORY = Path(__file__).parents[2]


def fatbin(*entries: tuple[int, int, bytes]) -> bytes:
    """Return a container of entries of (kind, architecture, content)."""
    body = b""
    for kind, architecture, content in entries:
        header = struct.pack("<HHIQ", kind, 0, 64, len(content))
        header += struct.pack("<III", 0, 0, 0) + struct.pack("<I", architecture)
        body += header.ljust(64, b"\0") + content
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def elf(needed: tuple[str, ...] = (), code: bytes = b"") -> bytes:
    """Return an ELF file of 64 bits with these needed libraries and this section of GPU code."""
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in needed)
    offsets = [strings.index(name.encode()) for name in needed]
    dynamic = b"".join(struct.pack("<QQ", 1, offset) for offset in offsets)
    names = b"\0.dynamic\0.dynstr\0.nv_fatbin\0.shstrtab\0"
    contents = {".dynamic": dynamic, ".dynstr": strings, ".nv_fatbin": code, ".shstrtab": names}
    data, rows = b"\x7fELF".ljust(64, b"\0"), [b"\0" * 64]
    for name, content in contents.items():
        start = names.index(name.encode())
        rows.append(struct.pack("<IIQQQQIIQQ", start, 1, 0, 0, len(data), len(content), *[0] * 4))
        data += content
    table = len(data)
    data += b"".join(rows)
    head = bytearray(data)
    struct.pack_into("<Q", head, 0x28, table)
    struct.pack_into("<HH", head, 0x3C, len(rows), len(rows) - 1)
    return bytes(head)


def test_code_for_other_gpus_becomes_zeros_and_nothing_moves() -> None:
    code = fatbin((2, 90, b"HOPPER--"), (2, 80, b"AMPERE--"), (1, 90, b"PTX-----"))
    library = elf(("libc.so.6",), code)
    kept = payload.without_other_gpus(library)
    assert len(kept) == len(library)
    assert b"HOPPER--" in kept
    assert b"AMPERE--" not in kept
    assert b"PTX-----" not in kept
    assert payload.needed(kept) == ["libc.so.6"]


def wheel(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for place, content in files.items():
            archive.writestr(place, content)
    return path


def test_of_nixl_only_the_libraries_that_are_loaded_or_needed_are_packed(tmp_path: Path) -> None:
    made = wheel(tmp_path, "nixl_cu13-1.5.1-cp312-cp312-any.whl", {
        "nixl_cu13/_api.py": b"", "nixl_cu13/libplugin_UCX.so": elf(("libucp.so.0",)),
        ".libs/plugins/libplugin_UCX.so": elf(("libucp.so.0",)),
        "nixl_cu13.libs/libucp.so.0": elf(("libucs.so.0", "libc.so.6")),
        "nixl_cu13.libs/libucs.so.0": elf(), "nixl_cu13/libplugin_GDS.so": elf(),
        "nixl_cu13-1.5.1.dist-info/METADATA": b"", "nixl_cu13-1.5.1.dist-info/RECORD": b"",
    })  # fmt: skip
    payload.unpack(made, tmp_path / "site")
    files = {str(f.relative_to(tmp_path / "site")) for f in (tmp_path / "site").rglob("*.*")}
    assert {f for f in files if ".so" in f} == {
        "nixl_cu13/libplugin_UCX.so", ".libs/plugins/libplugin_UCX.so",
        "nixl_cu13.libs/libucp.so.0", "nixl_cu13.libs/libucs.so.0",
    }  # fmt: skip
    assert not any(name.endswith("RECORD") for name in files)
    assert payload.machine_libraries(tmp_path / "site") == ["libc.so.6"]


def test_the_requirements_are_exact() -> None:
    wanted = payload.requirements()
    assert all(one.count("==") == 1 for one in wanted)
    assert {"vllm==0.32.0", "nixl-cu13==1.5.1"} <= set(wanted)


def test_a_bare_python_runs_the_command_from_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages of the archive are imported, and entry points are those of the projects."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel(wheels, "packed-1.0-py3-none-any.whl", {
        "packed/__init__.py": b"VALUE = 7\n", "packed/tests/test_it.py": b"",
        "packed-1.0.data/purelib/beside.py": b"", "packed-1.0.data/scripts/tool": b"",
    })  # fmt: skip
    archive = payload.make(tmp_path, ["packed==1.0"])
    assert json.loads((tmp_path / payload.MANIFEST).read_text())["bytes"] == archive.stat().st_size
    folder = tmp_path / "prepared"
    for _ in range(2):  # the second time nothing is unpacked again
        bootstrap.prepare(archive, folder, REPOSITORY)
    site = folder / "site"
    assert sorted(str(f.relative_to(site)) for f in site.rglob("*.py")) == [
        "beside.py", "packed/__init__.py",
    ]  # fmt: skip
    monkeypatch.setattr(bootstrap, "NEEDED", ("packed", "json", "torch_of_nobody"))
    assert bootstrap.missing(folder) == ["torch_of_nobody"]
    program = (
        "import packed, importlib.metadata as m;"
        "print(packed.VALUE, sorted(e.value for e in m.entry_points(group='dualpath.commands')))"
    )
    command = f". {folder}/environment.sh && {sys.executable} -S -c {program!r} && which dualpath"
    ended = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env={"PATH": os.environ["PATH"]}
    )
    assert ended.stdout.splitlines() == [
        "7 ['dualpath_lab.cli', 'dualpath_sim.cli']",
        str(folder / "bin/dualpath"),
    ]
