"""Inputs that are almost valid: a valid input with something changed, truncated or flipped.

Noise is refused by the first check.  Only inputs that are valid except for one thing reach the code
behind it, so most inputs are of this kind.  A seed and a number determine an input.
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
    """A source of inputs; equal arguments give equal inputs."""

    def __init__(self, seed: int, number: int) -> None:
        self.random = random.Random(seed << 40 | number)

    def one_of(self, options: Sequence[T]) -> T:
        """Return a random one of the options."""
        return options[int(self.random.random() * len(options))]

    def chance(self, share: float) -> bool:
        """Return True with this probability."""
        return self.random.random() < share

    def value(self, depth: int = 0) -> Any:  # noqa: ANN401 - any value
        """Return a random value of JSON or msgpack, mostly an unusual one."""
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

    def changed(self, value: Any) -> Any:  # noqa: ANN401 - any value
        """Return a value with one part replaced, removed, duplicated or added."""
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

    def damaged(self, valid: bytes) -> bytes:
        """Return bytes with a part truncated, flipped, duplicated or inserted; or noise."""
        kind = self.random.randrange(7)
        if kind == 0 or not valid:
            return self.random.randbytes(self.random.randrange(_MOST_INSERTED))
        place = self.random.randrange(len(valid))
        if kind == 1:
            return valid[:place]
        if kind == 2:
            return valid[place:]
        if kind == 3:
            inserted = self.random.randbytes(self.random.randrange(1, _MOST_INSERTED))
            return valid[:place] + inserted + valid[place:]
        if kind == 4:
            end = min(len(valid), place + self.random.randrange(1, _MOST_INSERTED))
            return valid[:end] + valid[place:]
        flipped = bytearray(valid)
        for _ in range(self.random.randrange(1, 4)):
            flipped[self.random.randrange(len(flipped))] ^= self.random.randrange(1, 256)
        return bytes(flipped)

    def json(self, valid: object) -> bytes:
        """Return JSON, or almost valid JSON."""
        if self.chance(0.01):
            return self.one_of((b"[" * 100_000, b'{"a":' * 50_000, b'{"x": "\xff"}', b"1e999"))
        changed = valid if self.chance(0.1) else self.changed(valid)
        text = msgspec.json.encode(changed)
        return self.damaged(text) if self.chance(0.2) else text

    def msgpack(self, valid: object) -> bytes:
        """Return msgpack, or almost valid msgpack."""
        if self.chance(0.001):
            return self.one_of((b"\x91" * 100_000, b"\x81\xa1x" * 50_000))
        changed = valid if self.chance(0.3) else self.changed(valid)
        try:
            packed = msgspec.msgpack.encode(changed)
        except OverflowError:
            packed = msgspec.msgpack.encode(valid)
        return self.damaged(packed) if self.chance(0.3) else packed
