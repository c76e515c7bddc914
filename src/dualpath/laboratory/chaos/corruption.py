"""Damage to stored blocks at rest, as by bit rot, a torn write or swapped files."""

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from dualpath.core.blocks import BlockKey
from dualpath.laboratory.chaos.matrix import Fault
from dualpath.storage.directory import object_name

_MOST_BITS = 8


def block_files(storage: Path, keys: Sequence[BlockKey]) -> list[Path]:
    """Return the files of the given blocks that are stored, in any namespace."""
    folders = [path for path in storage.iterdir() if path.is_dir()]
    paths = (storage / object_name(folder.name, key) for key in keys for folder in folders)
    return [path for path in paths if path.is_file()]


def corrupt(files: Sequence[Path], fault: Fault, chance: random.Random) -> int:
    """Damage files unless an engine removes or rewrites them first; return how many."""
    done = 0
    for group in _groups(files, 2 if fault is Fault.SWAPPED else 1):
        try:
            match fault:
                case Fault.BIT_FLIPS:
                    _flip_bits(group[0], chance)
                case Fault.TRUNCATED:
                    os.truncate(group[0], chance.randrange(group[0].stat().st_size))
                case Fault.NO_FILE:
                    _replace(group[0], chance)
                case _:
                    _swap(*group)
        except OSError:  # removed or rewritten meanwhile
            continue
        done += len(group)
    return done


def _groups(files: Sequence[Path], size: int) -> Iterator[tuple[Path, ...]]:
    return zip(*[iter(files)] * size, strict=False)


def _flip_bits(path: Path, chance: random.Random) -> None:
    with path.open("r+b") as file:
        size = path.stat().st_size
        for _ in range(chance.randint(1, _MOST_BITS)):
            place = chance.randrange(size)
            file.seek(place)
            byte = file.read(1)
            if byte:
                file.seek(place)
                file.write(bytes([byte[0] ^ 1 << chance.randrange(8)]))


def _replace(path: Path, chance: random.Random) -> None:
    """Replace a block's file by a directory, or by a FIFO, which blocks the process opening it."""
    path.unlink()
    chance.choice((os.mkdir, os.mkfifo))(path)


def _swap(one: Path, other: Path) -> None:
    aside = one.with_suffix(".aside")
    os.rename(one, aside)
    os.rename(other, one)
    os.rename(aside, other)
