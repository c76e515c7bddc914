"""A saved ``ChainIndex``: one object with everything the janitor knew, and what it knew it from.

``DUALIDX1``, 8 bytes with the length of a JSON head, the head, the columns one after the other,
the XXH3-64 of all that.  ``janitor/index/<term>-<number>``: the highest that is whole counts.
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


class Progress(msgspec.Struct, frozen=True):
    """How far the news of each writer are in the index, and how far the survey has come.

    ``surveyed_s`` is when the last whole survey ended (Unix time), None before the first.
    """

    taken: dict[str, int] = {}
    surveyed_s: float | None = None


class _Head(msgspec.Struct, frozen=True):
    rows: int
    namespaces: tuple[str, ...]
    tenants: tuple[str, ...]
    progress: Progress


def save(tree: ObjectTree, term: int, number: int, index: ChainIndex, progress: Progress) -> None:
    """Save, then remove what was saved before; raises ``StorageError``."""
    name = f"{SAVED}{term:08}-{number:08}"
    tree.replace(name, encode(index, progress))
    tree.remove([info.name for info in tree.objects(SAVED) if info.name < name])


def load(tree: ObjectTree) -> tuple[ChainIndex, Progress] | None:
    """Return what was saved last, None if nothing whole is there; raises ``StorageError``."""
    for name in sorted((info.name for info in tree.objects(SAVED)), reverse=True):
        content = tree.get(name)
        found = None if content is None else decode(content)
        if found is not None:
            return found
        log.warning("the storage's index %s is not whole; the storage is surveyed instead", name)
    return None


def encode(index: ChainIndex, progress: Progress) -> bytes:
    """Return the bytes of an index."""
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
    """Return the index, None if these bytes are none."""
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
        log.warning("a saved index does not fit itself: %s", error)
        return None
    return index, head.progress
