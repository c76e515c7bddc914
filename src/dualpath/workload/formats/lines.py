"""Reads trace files as JSON documents: plain, .gz or .xz, in folders, .tar or .zip (.whl) files."""

import gzip
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, TypeVar

import msgspec

from dualpath.core.errors import TraceError

#: Maximum tokens of one turn, more than any model supports; larger numbers are errors in the trace.
MAX_TURN_TOKENS = 1 << 24
#: Maximum delay, one year; longer delays are errors in the trace.
MAX_DELAY_S = 366 * 86400.0

OnBroken = Callable[[TraceError], None]
"""Called with the error of a broken line that is left out."""

_T = TypeVar("_T")
_Stream = IO[bytes] | gzip.GzipFile | lzma.LZMAFile
_ARCHIVE_SUFFIXES = (".zip", ".whl")
_COMPRESSION_SUFFIXES = (".xz", ".gz")
#: Errors that the readers of archives raise for invalid bytes.  Some have their own classes, and
#: zipfile raises others for a missing password or an unsupported compression.
_UNREADABLE = (
    *(OSError, EOFError, lzma.LZMAError, zlib.error, tarfile.TarError, zipfile.BadZipFile),
    *(NotImplementedError, RuntimeError, UnicodeDecodeError),
)


class Document(msgspec.Struct, frozen=True):
    """One JSON text: a line of a .jsonl file (``line`` counts from 1) or a whole .json file."""

    source: str
    line: int
    text: bytes

    @property
    def stem(self) -> str:
        """The file name without folders and suffixes."""
        return PurePosixPath(self.source).name.split(".")[0]

    def error(self, what: str) -> TraceError:
        """Return a ``TraceError`` with file, line, the fault and the remedy."""
        return TraceError(
            f"{self.source}, line {self.line}: {what}; correct the line, or pass --skip-broken "
            "to leave it out (it is counted and reported)"
        )

    def decode(self, as_type: type[_T]) -> _T:
        """Parse as ``as_type``; raises ``TraceError`` naming the invalid field."""
        try:
            return msgspec.json.decode(self.text, type=as_type)
        # RecursionError: too deeply nested JSON.
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self.error(str(error)) from error


def documents(path: Path) -> Iterator[Document]:
    """Yield every JSON text under ``path``, files in order of name.

    Raises ``TraceError`` if the path is missing, unreadable or contains no trace file.
    """
    try:
        found = False
        for source, stream in _streams(path):
            found = True
            yield from _split(source, stream)
    except _UNREADABLE as error:
        raise TraceError(f"{path}: cannot be read ({error}); check the path and the file") from None
    if not found:
        raise TraceError(
            f"{path}: has no .jsonl or .json file; give a trace file, a folder of them, "
            "or a .tar or .zip archive of them"
        )


def _streams(path: Path) -> Iterator[tuple[str, _Stream]]:
    if path.is_dir():
        names = [str(p.relative_to(path).as_posix()) for p in path.rglob("*") if p.is_file()]
        for name in _trace_names(names):
            with (path / name).open("rb") as raw:
                yield str(path / name), _decompressed(name, raw)
    elif path.suffix in _ARCHIVE_SUFFIXES:
        with zipfile.ZipFile(path) as archive:
            for name in _trace_names(archive.namelist()):
                with archive.open(name) as raw:
                    yield f"{path}/{name}", _decompressed(name, raw)
    elif ".tar" in path.suffixes or path.suffix == ".tgz":
        with tarfile.open(path) as tar:
            for name in _trace_names([m.name for m in tar.getmembers() if m.isfile()]):
                member = tar.extractfile(name)
                assert member is not None, f"{name} is a file"
                yield f"{path}/{name}", _decompressed(name, member)
    else:
        with path.open("rb") as raw:
            yield str(path), _decompressed(path.name, raw)


def _trace_names(names: list[str]) -> list[str]:
    """Return the trace files; if there are folders named ``traces``, only the files in them.

    agentperf packages have manifests and task lists outside their ``traces`` folder.
    """
    json_files = [name for name in names if _plain_suffix(name) in (".jsonl", ".json")]
    in_traces = [name for name in json_files if "traces" in PurePosixPath(name).parts[:-1]]
    return sorted(in_traces or json_files)


def _plain_suffix(name: str) -> str:
    path = PurePosixPath(name)
    return PurePosixPath(path.stem).suffix if path.suffix in _COMPRESSION_SUFFIXES else path.suffix


def _decompressed(name: str, raw: IO[bytes]) -> _Stream:
    if name.endswith(".xz"):
        return lzma.open(raw)
    if name.endswith(".gz"):
        return gzip.open(raw)
    return raw


def _split(source: str, stream: _Stream) -> Iterator[Document]:
    if _plain_suffix(source) == ".json":
        yield Document(source, 1, stream.read())
        return
    for number, text in enumerate(stream, start=1):
        if text.strip():
            yield Document(source, number, text)


def each(
    texts: Iterable[Document], parse: Callable[[Document], _T], on_broken: OnBroken | None
) -> Iterator[_T]:
    """Yield ``parse(document)`` of each; call ``on_broken`` with the errors of broken documents.

    Raises the first ``TraceError`` if ``on_broken`` is None.
    """
    for document in texts:
        try:
            parsed = parse(document)
        except TraceError as error:
            if on_broken is None:
                raise
            on_broken(error)
        else:
            yield parsed
