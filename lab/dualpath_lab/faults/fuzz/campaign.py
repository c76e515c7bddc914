"""A fuzzing campaign: many inputs, their outcomes, findings, and growth of memory.

An input may be accepted, or refused with the error defined for that.  Everything else is a
*finding*: another exception, an error or a traceback in the log, memory that grows, and a subject
that no longer works at the end.
"""

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import msgspec

from dualpath_lab.faults.fuzz.inputs import Inputs

#: Memory that allocators and caches may use in addition after the warm-up.
GROWTH_ALLOWED_BYTES = 48 << 20
#: The share of inputs after which growth of memory counts: all code is imported, caches are full.
_WARM_UP = 0.2
_FINDINGS_KEPT = 20
_SHOWN_CHARACTERS = 300


class Subject(Protocol):
    """The tested system; an asynchronous context manager."""

    #: The memory of this process is watched; None: of the current process.
    pid: int | None

    async def __aenter__(self) -> Self:
        """Start it."""
        ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop it and remove everything."""
        ...

    def input(self, inputs: Inputs) -> object:
        """Return an input."""
        ...

    async def run_input(self, given: object) -> str:
        """Pass the input to the system; return the outcome.  An exception is a finding."""
        ...

    async def still_works(self) -> None:
        """Raise if valid input is no longer accepted."""
        ...


class Finding(msgspec.Struct, frozen=True):
    """A printed input with its number, and the failure; -1 is the check at the end."""

    number: int
    given: str
    what: str


class FuzzResult(msgspec.Struct, frozen=True):
    """The result of ``count`` inputs; memory in bytes after the warm-up and at the end."""

    subject: str
    seed: int
    count: int
    outcomes: dict[str, int]
    findings: list[Finding]
    findings_total: int
    warm_bytes: int
    end_bytes: int

    @property
    def is_clean(self) -> bool:
        """Whether there are no findings."""
        return self.findings_total == 0


class _Errors(logging.Handler):
    """Collects errors and tracebacks of the log."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            kind = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else ""
            self.messages.append(f"log: {record.getMessage()} {kind}")


class Campaign:
    """``count`` inputs of one seed, ``at_once`` of them concurrently."""

    def __init__(
        self,
        name: str,
        subject: Subject,
        seed: int,
        count: int,
        *,
        at_once: int = 1,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._name = name
        self._subject = subject
        self._seed = seed
        self._count = count
        self._at_once = at_once
        self._progress = progress
        self._outcomes: Counter[str] = Counter()
        self._findings: list[Finding] = []
        self._found = 0
        self._next = 0
        self._warm_bytes = 0
        self._errors = _Errors()

    async def run(self) -> FuzzResult:
        """Run all inputs and return the result."""
        root = logging.getLogger()
        # Replaces all handlers: otherwise every refusal would be printed.
        before, root.handlers = root.handlers, [self._errors]
        try:
            async with self._subject:
                await asyncio.gather(*(self._worker() for _ in range(self._at_once)))
                await self._at_the_end()
                end_bytes = self._resident_bytes()
        finally:
            root.handlers = before
        if end_bytes - self._warm_bytes > GROWTH_ALLOWED_BYTES:
            self._add_finding(-1, "", f"memory grew from {self._warm_bytes} to {end_bytes} bytes")
        return FuzzResult(
            self._name,
            self._seed,
            self._count,
            dict(sorted(self._outcomes.items())),
            self._findings,
            self._found,
            self._warm_bytes,
            end_bytes,
        )

    async def _worker(self) -> None:
        while (number := self._next) < self._count:
            self._next += 1
            if number == int(self._count * _WARM_UP):
                self._warm_bytes = self._resident_bytes()
            if number and number % (max(self._count // 10, 1)) == 0:
                self._progress(f"{self._name}: {number} of {self._count}, {self._found} findings")
            given = self._subject.input(Inputs(self._seed, number))
            try:
                self._outcomes[await self._subject.run_input(given)] += 1
            except Exception as error:  # any exception is a finding
                self._add_finding(number, given, f"{type(error).__name__}: {error}")
            self._add_logged(number, given)

    async def _at_the_end(self) -> None:
        try:
            await self._subject.still_works()
        except Exception as error:
            self._add_finding(-1, "", f"does not work any more: {type(error).__name__}: {error}")
        self._add_logged(-1, "")

    def _add_logged(self, number: int, given: object) -> None:
        messages, self._errors.messages = self._errors.messages, []
        for what in messages:
            self._add_finding(number, given, what)

    def _add_finding(self, number: int, given: object, what: str) -> None:
        self._found += 1
        if len(self._findings) < _FINDINGS_KEPT:
            shown = ascii(given)[:_SHOWN_CHARACTERS]
            self._findings.append(Finding(number, shown, ascii(what)[1 : _SHOWN_CHARACTERS * 2]))

    def _resident_bytes(self) -> int:
        gc.collect()
        process = self._subject.pid or "self"
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) << 10
        return 0
