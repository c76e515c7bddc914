"""Opens traces: decompresses and decodes files, and numbers the JSON texts in them.

Every format is read through this module, so that all are lenient and strict in the same way:

- A trace is a file, a folder, or a ``.tar`` or ``.zip`` archive.  Archives and compression (gzip,
  xz, bzip2, Zstandard) are recognised by content.  Files that systems add (``__MACOSX``, ``._*``
  and others with a dot before their name) are passed over.
- Text is UTF-8, or UTF-16 with a byte order mark; byte order marks are removed.  Empty lines are
  passed over.  Rows of a ``.csv`` file become JSON objects with the names in its first line.
- A field that is null counts as missing.  A number like ``1536.0`` is an integer where one is
  expected.  ``NaN`` and ``Infinity`` are JSON, but no value that a field accepts.
- Everything else that a format does not describe is an error, which names file and line.
"""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar, cast

import msgspec
from msgspec import inspect

from dualpath.core.errors import TraceError
from dualpath.core.extras import extra

#: Maximum tokens of one turn, more than any model supports; larger numbers are errors in the trace.
MAX_TURN_TOKENS = 1 << 24
#: Maximum delay, one year; longer delays are errors in the trace.
MAX_DELAY_S = 366 * 86400.0

OnBroken = Callable[[TraceError], None]
"""Called with the error of a broken line that is left out."""

Id = str | int
"""An id of a session or request; its text is the name."""

_T = TypeVar("_T")

_ZIP_SUFFIXES = (".zip", ".whl")
_COMPRESSION_SUFFIXES = (".xz", ".gz", ".zst", ".bz2")
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_CSV_SUFFIX = ".csv"
#: Errors that the readers of archives raise for invalid bytes.  Some have their own classes, and
#: zipfile raises others for a missing password or an unsupported compression.
_UNREADABLE = (
    *(OSError, EOFError, lzma.LZMAError, zlib.error, tarfile.TarError, zipfile.BadZipFile),
    *(NotImplementedError, RuntimeError, UnicodeError, csv.Error),
)


class Document(msgspec.Struct, frozen=True):
    """One JSON text: a line of a file (``line`` counts from 1) or a whole .json file.

    A ``fault`` names what is wrong with a line that gave no JSON text.
    """

    source: str
    line: int
    text: bytes
    fault: str = ""

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
        if self.fault:
            raise self.error(self.fault)
        try:
            return _decoded(self.text, as_type)
        # RecursionError: too deeply nested JSON.
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self.error(str(error)) from error


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
            report(error, on_broken)
        else:
            yield parsed


def by_file(texts: Iterable[Document]) -> Iterator[tuple[str, Iterator[Document]]]:
    """Yield the documents of each file: names and block ids mean the same within a file only.

    Beside them is what the names of its sessions begin with: nothing in the first file, then the
    file's name.
    """
    files = groupby(texts, key=lambda document: document.source)
    for number, (source, of_file) in enumerate(files):
        yield f"{PurePosixPath(source).name.split('.')[0]}/" if number else "", of_file


class SkippedLines:
    """An ``OnBroken`` that counts the lines that are left out, and keeps the first errors."""

    def __init__(self) -> None:
        """Start without lines."""
        self.count = 0
        self._first: list[TraceError] = []

    def __call__(self, error: TraceError) -> None:
        """Count one line."""
        self.count += 1
        if len(self._first) < _ERRORS_SHOWN:
            self._first.append(error)

    def report(self) -> list[str]:
        """Return what to show of them: the first errors, and how many more there are."""
        shown = [f"skipped: {error}" for error in self._first]
        more = self.count - len(shown)
        return [*shown, f"skipped: {more} more invalid lines"] if more else shown


_ERRORS_SHOWN = 5


def report(error: TraceError, on_broken: OnBroken | None) -> None:
    """Call ``on_broken`` with the error of a line that is left out; raise it if that is None."""
    if on_broken is None:
        raise error
    on_broken(error)


# -------------------------------------------------------------------------------------------- JSON
# Decodes JSON as msgspec does, with nulls as missing fields and integral floats as integers.


def _decoded(text: bytes, as_type: type[_T]) -> _T:
    try:
        return msgspec.json.decode(text, type=as_type)
    except msgspec.DecodeError:
        value = _parsed(text)
    return msgspec.convert(_lenient(value, _info(cast(Hashable, as_type))), as_type)


def _parsed(text: bytes) -> object:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        try:
            # Python's own reader knows NaN and Infinity, which msgspec refuses.
            return json.loads(text)
        except ValueError:
            pass
        raise


@cache
def _info(as_type: Hashable) -> inspect.Type:
    return inspect.type_info(as_type)


def _lenient(value: object, expected: inspect.Type) -> object:
    """Return a parsed value without nulls and with integers where ``expected`` wants such.

    Values of any type (tools, message contents) are returned unchanged.
    """
    kinds = expected.types if isinstance(expected, inspect.UnionType) else (expected,)
    if isinstance(value, float) and value.is_integer():
        wanted = {type(kind) for kind in kinds}
        as_integer = inspect.IntType in wanted and inspect.FloatType not in wanted
        return int(value) if as_integer else value
    for kind in kinds:
        if isinstance(value, dict) and isinstance(kind, inspect.StructType):
            return _lenient_fields(value, kind)
        if isinstance(value, list) and isinstance(kind, inspect.CollectionType):
            return [_lenient(item, kind.item_type) for item in value]
    if isinstance(value, list):
        for kind in kinds:
            if isinstance(kind, inspect.TupleType) and len(kind.item_types) == len(value):
                return [_lenient(*pair) for pair in zip(value, kind.item_types, strict=True)]
    return value


def _lenient_fields(value: Mapping[str, Any], kind: inspect.StructType) -> dict[str, Any]:
    found = dict(value)
    for field in kind.fields:
        given = found.get(field.encode_name)
        if given is not None:
            found[field.encode_name] = _lenient(given, field.type)
        elif field.encode_name in found and not _takes_null(field.type):
            del found[field.encode_name]
    return found


def _takes_null(expected: inspect.Type) -> bool:
    kinds = expected.types if isinstance(expected, inspect.UnionType) else (expected,)
    return any(isinstance(kind, inspect.NoneType | inspect.AnyType) for kind in kinds)


# ------------------------------------------------------------------------------------------- files
# Finds the trace files in folders and archives and opens them.


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
            f"{path}: has no .jsonl, .json or .csv file; give a trace file, a folder of them, "
            "or a .tar or .zip archive of them"
        )


def _streams(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield name and decompressed bytes of every trace file."""
    if path.is_dir():
        names = [str(p.relative_to(path).as_posix()) for p in path.rglob("*") if p.is_file()]
        for name in _trace_names(names):
            with (path / name).open("rb") as file:
                yield str(path / name), _decompressed(str(path / name), file)
        return
    with path.open("rb") as file:
        # A pipe, such as /dev/stdin, cannot be read twice.
        raw: IO[bytes] = file if file.seekable() else io.BytesIO(file.read())
        if path.suffix in _ZIP_SUFFIXES or zipfile.is_zipfile(raw):
            yield from _zipped(path, raw)
            return
        raw.seek(0)
        stream = _decompressed(str(path), raw)
        if _is_tar(stream) or ".tar" in path.suffixes or path.suffix == ".tgz":
            yield from _archived(path, stream)
        else:
            yield str(path), stream


def _zipped(path: Path, raw: IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(raw) as archive:
        for name in _trace_names(archive.namelist()):
            with archive.open(name) as member:
                yield f"{path}/{name}", _decompressed(f"{path}/{name}", member)


def _archived(path: Path, stream: IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
    with tarfile.open(fileobj=stream, mode="r:") as tar:
        for name in _trace_names([m.name for m in tar.getmembers() if m.isfile()]):
            member = tar.extractfile(name)
            assert member is not None, f"{name} is a file"
            yield f"{path}/{name}", _decompressed(f"{path}/{name}", member)


_TAR_MAGIC_PLACE, _TAR_MAGIC = 257, b"ustar"


def _is_tar(stream: IO[bytes]) -> bool:
    head = stream.read(_TAR_MAGIC_PLACE + len(_TAR_MAGIC))
    stream.seek(0)
    return head[_TAR_MAGIC_PLACE:] == _TAR_MAGIC


def _trace_names(names: Sequence[str]) -> list[str]:
    """Return the trace files; if there are folders named ``traces``, only the files in them.

    agentperf packages have manifests and task lists outside their ``traces`` folder.  Tables
    (.csv) are read where there is no JSON file.
    """
    own = [name for name in names if not _is_metadata(name)]
    found = [name for name in own if _plain_suffix(name) in _JSON_SUFFIXES] or [
        name for name in own if _plain_suffix(name) == _CSV_SUFFIX
    ]
    in_traces = [name for name in found if "traces" in PurePosixPath(name).parts[:-1]]
    return sorted(in_traces or found)


def _is_metadata(name: str) -> bool:
    """Return whether a system or a tool added the file (macOS' ``__MACOSX/`` and ``._x``, …)."""
    parts = PurePosixPath(name).parts
    return any(part == "__MACOSX" or (part[0] == "." and part not in (".", "..")) for part in parts)


def _plain_suffix(name: str) -> str:
    path = PurePosixPath(name)
    return PurePosixPath(path.stem).suffix if path.suffix in _COMPRESSION_SUFFIXES else path.suffix


#: Openers of compressed files by their first bytes.
_COMPRESSIONS: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"\xfd7zXZ\x00": lzma.open,
    b"BZh": bz2.open,
    b"\x28\xb5\x2f\xfd": lambda raw: _zstandard()(raw),
}
#: Kinds of files that are not read, by their first bytes.
_REFUSED = {
    b"PAR1": "an Apache Parquet file",
    b"\x89HDF": "an HDF5 file",
    b"7z\xbc\xaf\x27\x1c": "a 7-Zip archive",
    b"Rar!": "a RAR archive",
    b"SQLite format 3": "an SQLite database",
}
_HEAD_BYTES = max(map(len, (*_COMPRESSIONS, *_REFUSED)))


def _decompressed(source: str, raw: IO[bytes]) -> IO[bytes]:
    """Return the file's bytes, decompressed if its first bytes are those of a compression.

    Raises ``TraceError`` for a kind of file that is not read.
    """
    head = raw.read(_HEAD_BYTES)
    raw.seek(0)
    for magic, opened in _COMPRESSIONS.items():
        if head.startswith(magic):
            try:
                return cast(IO[bytes], opened(raw))
            except ModuleNotFoundError:
                raise TraceError(
                    f"{source}: is compressed with Zstandard, which the package backports.zstd "
                    f"reads; {extra('zstd').remedy}, or decompress it with `zstd -d`"
                ) from None
    for magic, kind in _REFUSED.items():
        if head.startswith(magic):
            raise TraceError(f"{source}: is {kind}, which is not read; convert it to JSON lines")
    return raw


def _zstandard() -> Callable[[IO[bytes]], IO[bytes]]:
    """Return the opener of Zstandard files; raises ``ModuleNotFoundError`` if there is none."""
    from backports import zstd

    return cast(Callable[[IO[bytes]], IO[bytes]], zstd.open)


# ------------------------------------------------------------------------------------------- lines
# Splits decompressed files into JSON texts.


def _split(source: str, stream: IO[bytes]) -> Iterator[Document]:
    suffix = _plain_suffix(source)
    if suffix == _CSV_SUFFIX:
        yield from _rows(source, _lines(stream))
    elif suffix == ".json":
        text = b"".join(_lines(stream))
        if not _is_json_lines(text):
            yield Document(source, 1, text)
            return
        yield from _numbered(source, io.BytesIO(text))
    else:
        yield from _numbered(source, _lines(stream))


def _numbered(source: str, lines: Iterable[bytes]) -> Iterator[Document]:
    for number, text in enumerate(lines, start=1):
        if text.strip():
            yield Document(source, number, text)


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines as UTF-8 without byte order marks."""
    first = stream.readline()
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        stream.seek(0)
        yield from (line.encode() for line in io.TextIOWrapper(stream, encoding="utf-16"))
        return
    yield first.removeprefix(codecs.BOM_UTF8)
    # Files that were appended to one another have marks between them.
    yield from (line.removeprefix(codecs.BOM_UTF8) for line in stream)


def _is_json_lines(text: bytes) -> bool:
    """Return whether a .json file is several JSON texts, one per line, instead of one text."""
    first, _, rest = text.strip().partition(b"\n")
    if not rest.strip():
        return False
    try:
        msgspec.json.decode(first)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _rows(source: str, lines: Iterable[bytes]) -> Iterator[Document]:
    """Yield each row of a table as a JSON object of texts, which has the table's column names."""
    rows = csv.reader(line.decode() for line in lines)
    names = [name.strip() for name in next(rows, [])]
    for row in rows:
        if not any(cell.strip() for cell in row):
            continue
        fault = (
            ""
            if len(row) == len(names)
            else f"has {len(row)} values, but the first line names {len(names)} columns"
        )
        cells = {name: cell.strip() for name, cell in zip(names, row, strict=False)}
        yield Document(source, rows.line_num, msgspec.json.encode(cells), fault)
