"""Inputs that are almost right: the honest one with something changed, cut off or turned over.

Noise is refused by the first check.  What reaches the code behind is honest but for one thing, so
most inputs are.  A number and a seed give the same input again.
"""

import random
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_NUMBERS = (0, 1, -1, 2, 7, 64, 255, 2**31, -(2**31), 2**53, 2**63 - 1, -(2**63), 2**64 - 1)
_FLOATS = (0.0, -0.5, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"))
_TEXTS = (
    *("", "x", "0", "true", "null", "\n", "\x00", "\x1b[2J", "..", "../../x", "a" * 300),
    *("\u202e", "\ufeff", "é", "\U0001f600", "%s%n", "{}", "<b>", "'; --", "-1", "1e999"),
)
_MOST_INSERTED = 64
_DEEPEST = 4


class Inputs:
    """A source of inputs; equal seeds give equal inputs."""

    def __init__(self, seed: int, number: int) -> None:
        self.random = random.Random(seed << 40 | number)

    def one_of(self, options: Sequence[T]) -> T:
        """Return one of them."""
        return options[int(self.random.random() * len(options))]

    def chance(self, share: float) -> bool:
        """Return True in that share of cases."""
        return self.random.random() < share

    def value(self, depth: int = 0) -> Any:  # noqa: ANN401 - anything at all
        """Return any value that JSON or msgpack has; odd ones above all."""
        kind = self.random.randrange(8 if depth < _DEEPEST else 6)
        match kind:
            case 0:
                return None
            case 1:
                return self.chance(0.5)
            case 2:
                return self.one_of(_NUMBERS)
            case 3:
                return self.one_of(_FLOATS)
            case 4 | 5:
                return self.one_of(_TEXTS)
            case 6:
                return [self.value(depth + 1) for _ in range(self.random.randrange(4))]
        names = self.random.sample(_TEXTS, self.random.randrange(3))
        return {name: self.value(depth + 1) for name in names}

    def changed(self, value: Any) -> Any:  # noqa: ANN401 - anything at all
        """Return a value with one thing in it replaced, left out, doubled or added."""
        if isinstance(value, dict) and value and not self.chance(0.15):
            name = self.one_of(sorted(value, key=str))
            match self.random.randrange(6):
                case 0:
                    return {k: v for k, v in value.items() if k != name}
                case 1:
                    return {**value, self.one_of(_TEXTS): self.value()}
            return {**value, name: self.changed(value[name])}
        if isinstance(value, list | tuple) and value and not self.chance(0.2):
            place = self.random.randrange(len(value))
            match self.random.randrange(5):
                case 0:
                    return [*value[:place], *value[place + 1 :]]
                case 1:
                    return [*value[: place + 1], *value[place:]]
            return [*value[:place], self.changed(value[place]), *value[place + 1 :]]
        return self.value()

    def damaged(self, honest: bytes) -> bytes:
        """Return bytes with some cut off, turned over, doubled, moved or put in; or noise."""
        kind = self.random.randrange(7)
        if kind == 0 or not honest:
            return self.random.randbytes(self.random.randrange(_MOST_INSERTED))
        place = self.random.randrange(len(honest))
        if kind == 1:
            return honest[:place]
        if kind == 2:
            return honest[place:]
        if kind == 3:
            inserted = self.random.randbytes(self.random.randrange(1, _MOST_INSERTED))
            return honest[:place] + inserted + honest[place:]
        if kind == 4:
            end = min(len(honest), place + self.random.randrange(1, _MOST_INSERTED))
            return honest[:end] + honest[place:]
        turned = bytearray(honest)
        for _ in range(self.random.randrange(1, 4)):
            turned[self.random.randrange(len(turned))] ^= self.random.randrange(1, 256)
        return bytes(turned)

    def json(self, honest: object) -> bytes:
        """Return JSON, or what is almost JSON."""
        if self.chance(0.01):
            return self.one_of((b"[" * 100_000, b'{"a":' * 50_000, b'{"x": "\xff"}', b"1e999"))
        changed = honest if self.chance(0.1) else self.changed(honest)
        text = msgspec.json.encode(changed)
        return self.damaged(text) if self.chance(0.2) else text

    def msgpack(self, honest: object) -> bytes:
        """Return msgpack, or what is almost msgpack."""
        if self.chance(0.001):
            return self.one_of((b"\x91" * 100_000, b"\x81\xa1x" * 50_000))
        changed = honest if self.chance(0.3) else self.changed(honest)
        try:
            packed = msgspec.msgpack.encode(changed)
        except OverflowError:
            packed = msgspec.msgpack.encode(honest)
        return self.damaged(packed) if self.chance(0.3) else packed
