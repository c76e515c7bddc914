"""The janitor's saved ``ChainIndex``: one object per save.

Format: ``DUALIDX1``, 8 bytes with the length of a JSON head, the head, the columns one after the
other, then the XXH3-64 of everything before.  Name: ``janitor/index/<term>-<number>``; the highest
one that is intact is loaded.
"""

import logging
from typing import Any

import msgspec
import numpy as np
import xxhash

from dualpath.policy.chain_index import COLUMNS, ChainIndex, Tables
from dualpath.storage.objects import ObjectTree

log = logging.getLogger(__name__)

SAVED = "janitor/index/"
_MAGIC = b"DUALIDX1"
_LENGTH_BYTES = 8


class Progress(msgspec.Struct, frozen=True, rename={"applied": "taken"}):
    """Which journal segments are in the index, and when the storage was surveyed.

    ``applied`` maps each writer to the number of its last applied segment.  ``surveyed_s`` is when
    the last complete survey ended (Unix time), None before the first.
    """

    applied: dict[str, int] = {}
    surveyed_s: float | None = None


class _Head(msgspec.Struct, frozen=True):
    rows: int
    namespaces: tuple[str, ...]
    tenants: tuple[str, ...]
    progress: Progress


def save(tree: ObjectTree, term: int, number: int, index: ChainIndex, progress: Progress) -> None:
    """Save the index, then remove older saved ones; raises ``StorageError``."""
    name = f"{SAVED}{term:08}-{number:08}"
    tree.replace(name, encode(index, progress))
    tree.remove([info.name for info in tree.objects(SAVED) if info.name < name])


def load(tree: ObjectTree) -> tuple[ChainIndex, Progress] | None:
    """Return the newest intact saved index, None if there is none; raises ``StorageError``."""
    for name in sorted((info.name for info in tree.objects(SAVED)), reverse=True):
        content = tree.get(name)
        found = None if content is None else decode(content)
        if found is not None:
            return found
        log.warning("the storage's saved index %s is damaged; the storage is surveyed again", name)
    return None


def encode(index: ChainIndex, progress: Progress) -> bytes:
    """Return the bytes of a saved index."""
    tables = index.tables()
    head = msgspec.json.encode(
        _Head(len(tables.stored), tuple(index.namespaces), tuple(index.tenants), progress)
    )
    parts = [_MAGIC, len(head).to_bytes(_LENGTH_BYTES, "little"), head]
    parts += [getattr(tables, name).tobytes() for name, _, _ in COLUMNS]
    checksum = xxhash.xxh3_64()
    for part in parts:
        checksum.update(part)
    return b"".join((*parts, checksum.digest()))


def decode(content: bytes) -> tuple[ChainIndex, Progress] | None:
    """Return the index, None if the bytes are damaged or of another format."""
    start = len(_MAGIC) + _LENGTH_BYTES
    body = memoryview(content)[:-8]
    if content[: len(_MAGIC)] != _MAGIC or xxhash.xxh3_64_digest(body) != content[-8:]:
        return None
    end = start + int.from_bytes(content[len(_MAGIC) : start], "little")
    columns: dict[str, Any] = {}
    try:
        head = msgspec.json.decode(content[start:end], type=_Head)
        for name, kind, width in COLUMNS:
            shape = (head.rows, *width)
            count = int(np.prod(shape))
            columns[name] = np.frombuffer(content, kind, count, end).reshape(shape).copy()
            end += count * np.dtype(kind).itemsize
        index = ChainIndex.of(head.namespaces, head.tenants, Tables(**columns))
    except (ValueError, msgspec.MsgspecError) as error:
        log.warning("a saved index is inconsistent: %s", error)
        return None
    return index, head.progress
