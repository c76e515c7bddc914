"""Makes an archive that carries vLLM's CUDA build and NIXL to a bare machine without a network.

    python -m dualpath_lab.gpu.payload --out FOLDER

pip downloads the wheels of ``payload-requirements.txt`` for the Python of that machine.  Of each,
only what an engine of a dense model needs is packed, and code for other GPUs in vLLM's libraries is
overwritten with zeros: files keep their size, and xz packs zeros into almost nothing.  The archive
has about 42 MiB; README.md in this folder has the commands for the bare machine.

No GPU has run a trimmed library yet.
"""

import argparse
import hashlib
import json
import lzma
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

REQUIREMENTS = Path(__file__).with_name("payload-requirements.txt")
ARCHIVE, MANIFEST = "payload.tar.xz", "payload.json"
PYTHON = "3.12"
#: Compute capability, times ten, of the GPUs with packed code: Hopper.
ARCHITECTURES = frozenset({90})
_PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 26, 24, 17)),
    "manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64",
)  # fmt: skip
_DOWNLOAD_S = 1800.0

# ---------------------------------------------------------------------------------------- selection
# Which files of a wheel are packed.

_VLLM_LIBRARIES = frozenset({
    "vllm/_C_stable_libtorch.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", "vllm/cumem_allocator.abi3.so",
    "vllm/spinloop.abi3.so", "vllm/fs_io_C.abi3.so",
})  # fmt: skip
_VLLM_SOURCES = (".hpp", ".h", ".cuh", ".cu", ".jpg", ".js", ".css")
#: Libraries that NIXL loads by name; those that they need follow from their ELF headers.
_NIXL_LIBRARIES = (
    r"_bindings\..*\.so", r"_utils\..*\.so", r"libplugin_UCX\.so", r"libplugin_POSIX\.so",
    r"libuct_cuda\.so.*", r"libucm_cuda\.so.*", r"libuct_cma\.so.*",
)  # fmt: skip
_LIBRARY = re.compile(r"\.so(\.|$)")
_DEVELOPMENT = re.compile(r"(^|/)(tests?|include|docs?)/|\.(pyi|h|hpp|a|lib|html|rst)$")


def selected(wheel: str, archive: zipfile.ZipFile) -> list[str]:
    """Return the names of the files of a wheel that are packed."""
    names = [name for name in archive.namelist() if not name.endswith(("/", "/RECORD"))]
    if wheel.startswith("vllm-"):
        return [name for name in names if _of_vllm(name)]
    if wheel.startswith("nixl_cu"):
        libraries = _needed_libraries(archive, names)
        return [n for n in names if n in libraries or n.endswith(".py") or ".dist-info/" in n]
    return [name for name in names if not _DEVELOPMENT.search(name)]


def _of_vllm(name: str) -> bool:
    if name.endswith(".so"):
        return name in _VLLM_LIBRARIES
    if name.startswith("vllm/third_party/") and not name.endswith(".py"):
        return False
    if name.startswith("vllm/model_executor/layers/") and name.endswith(".json"):
        return False  # Tuned sizes of kernels for experts.
    return name != "vllm/vllm-rs" and not name.endswith(_VLLM_SOURCES)


def _needed_libraries(archive: zipfile.ZipFile, names: Collection[str]) -> set[str]:
    """Return NIXL's libraries that are loaded by name, and all that these need.

    The wheel has every plugin twice, and NIXL looks in one of the two folders: both are packed.
    """
    places = defaultdict(list)
    for name in names:
        if _LIBRARY.search(name):
            places[Path(name).name].append(name)
    todo = [name for name in places if any(re.fullmatch(root, name) for root in _NIXL_LIBRARIES)]
    found: set[str] = set()
    while todo:
        for name in places.pop(todo.pop(), ()):
            found.add(name)
            todo += needed(archive.read(name))
    return found


# ---------------------------------------------------------------------------------------- libraries
# ELF files of 64 bits: their sections, needed libraries, and code for GPUs.

_FATBIN_MAGIC = 0xBA55ED50
_MACHINE_CODE = 2
_DT_NEEDED = 1


class _Section(NamedTuple):
    name: str
    address: int
    offset: int
    size: int


def sections(data: bytes) -> Iterator[_Section]:
    """Yield the sections of an ELF file; raises ``struct.error`` for a broken one."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    count, names_index = struct.unpack_from("<HH", data, 0x3C)
    rows = [struct.unpack_from("<IIQQQQIIQQ", data, table + 64 * row) for row in range(count)]
    for row in rows:
        start = rows[names_index][4] + row[0]
        yield _Section(data[start : data.index(b"\0", start)].decode(), row[3], row[4], row[5])


def needed(data: bytes) -> list[str]:
    """Return the names of the libraries that an ELF file needs."""
    found = {section.name: section for section in sections(data)}
    if ".dynamic" not in found or ".dynstr" not in found:
        return []
    dynamic, names = found[".dynamic"], found[".dynstr"]
    texts = []
    for place in range(dynamic.offset, dynamic.offset + dynamic.size, 16):
        tag, value = struct.unpack_from("<QQ", data, place)
        if tag == _DT_NEEDED:
            start = names.offset + value
            texts.append(data[start : data.index(b"\0", start)].decode())
    return texts


def without_other_gpus(data: bytes, architectures: Collection[int] = ARCHITECTURES) -> bytes:
    """Return a library in which PTX and machine code for other architectures are zeros.

    Headers stay, so that the loader finds the entries of the same sizes at the same places.
    """
    result = bytearray(data)
    for section in sections(data):
        if section.name != ".nv_fatbin":
            continue
        for start, length, kind, architecture in fatbin_entries(data, section.offset, section.size):
            if kind != _MACHINE_CODE or architecture not in architectures:
                result[start : start + length] = bytes(length)
    return bytes(result)


def fatbin_entries(data: bytes, offset: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (offset of content, its length, kind, architecture) of each entry of a section.

    Kind 1 is PTX, 2 machine code.
    """
    place, end = offset, offset + size
    while place < end - 16:
        magic, _, header, length = struct.unpack_from("<IHHQ", data, place)
        if magic != _FATBIN_MAGIC:
            place += 8
            continue
        entry, stop = place + header, place + header + length
        while entry < stop:
            kind, _, entry_header, entry_length = struct.unpack_from("<HHIQ", data, entry)
            (architecture,) = struct.unpack_from("<I", data, entry + 28)
            yield entry + entry_header, entry_length, kind, architecture
            entry += entry_header + entry_length
        place = stop


# ------------------------------------------------------------------------------------------ archive


def requirements(path: Path = REQUIREMENTS) -> list[str]:
    """Return the requirements, without comments."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def download(folder: Path, wanted: Collection[str], python: str = PYTHON) -> list[Path]:
    """Download the wheels for a version of Python, the bare machine's, and return them.

    Wheels that are in the folder already are not downloaded again.  Raises
    ``subprocess.CalledProcessError`` if pip does not find one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [one for one in wanted if _wheel(folder, one) is None]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--implementation", "cp", "--python-version", python, "--dest", str(folder)]
    for abi in (f"cp{python.replace('.', '')}", "abi3", "none"):
        command += ["--abi", abi]
    for platform in _PLATFORMS:
        command += ["--platform", platform]
    if missing:
        subprocess.run([*command, *missing], check=True, timeout=_DOWNLOAD_S)
    found = {one: _wheel(folder, one) for one in wanted}
    return [wheel for wheel in found.values() if wheel is not None]


def _wheel(folder: Path, requirement: str) -> Path | None:
    name, _, version = requirement.partition("==")
    stem = re.sub(r"[-_.]+", "_", name).lower()
    for path in folder.glob("*.whl"):
        its_name, its_version = path.name.split("-")[:2]
        if re.sub(r"[-_.]+", "_", its_name).lower() == stem and its_version == version:
            return path
    return None


def unpack(wheel: Path, site: Path) -> None:
    """Unpack what is needed of a wheel into ``site``, as pip would place it."""
    with zipfile.ZipFile(wheel) as archive:
        for name in selected(wheel.name, archive):
            data = archive.read(name)
            before, data_folder, inside = name.partition(".data/")
            part, _, rest = inside.partition("/")
            if data_folder and part not in ("purelib", "platlib"):
                continue
            if wheel.name.startswith("vllm-") and name.endswith(".so"):
                data = without_other_gpus(data)
            target = site / (rest if data_folder else before)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)


def pack(site: Path, archive: Path) -> None:
    """Pack ``site`` reproducibly, with libraries last so that they share xz's dictionary."""
    files = sorted(path for path in site.rglob("*") if path.is_file())
    files.sort(key=lambda path: bool(_LIBRARY.search(path.name)))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 192 << 20}]
    with (
        lzma.open(archive, "wb", filters=filters) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in files:
            entry = tar.gettarinfo(path, f"site/{path.relative_to(site)}")
            entry.uid = entry.gid = 0
            entry.mtime, entry.uname, entry.gname = 0, "", ""
            entry.mode = 0o755 if _LIBRARY.search(path.name) else 0o644
            with path.open("rb") as file:
                tar.addfile(entry, file)


def machine_libraries(site: Path) -> list[str]:
    """Return the libraries that those in ``site`` need of the machine, such as libcudart.so.13."""
    libraries = [path for path in site.rglob("*") if _LIBRARY.search(path.name)]
    packed = {path.name for path in libraries}
    wanted = {name for path in libraries for name in needed(path.read_bytes())}
    return sorted(wanted - packed)


def make(out: Path, wanted: Collection[str]) -> Path:
    """Make the archive and its manifest in a folder; return the archive."""
    wheels = download(out / "wheels", wanted)
    archive = out / ARCHIVE
    with tempfile.TemporaryDirectory(dir=out) as folder:
        site = Path(folder) / "site"
        site.mkdir()
        for wheel in wheels:
            unpack(wheel, site)
        pack(site, archive)
        libraries = machine_libraries(site)
        unpacked_bytes = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    manifest = {
        "bytes": archive.stat().st_size,
        "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
        "unpacked_bytes": unpacked_bytes,
        "wheels": sorted(wheel.name for wheel in wheels),
        "libraries_of_the_machine": libraries,
    }
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return archive


def main() -> None:
    """Make the archive as the command line requests."""
    parser = argparse.ArgumentParser(
        prog="python -m dualpath_lab.gpu.payload",
        description="Make an archive with vLLM's CUDA build and NIXL for a bare machine.",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-payload"), metavar="FOLDER")
    archive = make(parser.parse_args().out, requirements())
    print(f"{archive}: {archive.stat().st_size / (1 << 20):.1f} MiB")


if __name__ == "__main__":
    main()
