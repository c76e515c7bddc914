"""Shows the progress of a replay on stderr: one live line on a terminal, else plain lines."""

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

#: Seconds between plain lines.
PLAIN_INTERVAL_S = 5.0


class ProgressState(msgspec.Struct, frozen=True):
    """Counts so far; ``turns_total`` is the recorded number, an upper bound with truncation."""

    elapsed_s: float
    sessions_done: int
    sessions_total: int
    turns_done: int
    turns_total: int
    turns_failed: int
    prompt_tokens: int
    hit_tokens: int | None

    def line(self, label: str) -> str:
        """Return the state in one line."""
        parts = [
            label,
            f"agents {self.sessions_done}/{self.sessions_total}",
            f"turns {self.turns_done}/{self.turns_total}",
            f"{self.elapsed_s:.0f} s",
        ]
        if self.hit_tokens is not None and self.prompt_tokens:
            parts.append(f"hit {self.hit_tokens / self.prompt_tokens:.1%}")
        if self.turns_failed:
            parts.append(f"FAILED {self.turns_failed}")
        return "  ".join(part for part in parts if part)


class Progress(Protocol):
    """Called after every finished turn and session."""

    def update(self, state: ProgressState) -> None:
        """Show ``state``."""


class NoProgress:
    """Shows nothing."""

    def update(self, state: ProgressState) -> None:
        """Do nothing."""


class ConsoleProgress:
    """Shows progress on stderr; use as a context manager around the run."""

    def __init__(
        self,
        label: str = "",
        console: Console | None = None,
        left_s: Callable[[ProgressState], float] | None = None,
    ) -> None:
        """Prefix every line with ``label``; ``left_s`` estimates the remaining seconds."""
        self._console = console or Console(file=sys.stderr)
        self._label = label
        self._left_s = left_s
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._last_plain_s = -PLAIN_INTERVAL_S
        self._last: ProgressState | None = None

    def __enter__(self) -> Self:
        """Take over the line."""
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the last state visible."""
        if self._console.is_terminal:
            self._live.stop()
        elif self._last is not None:
            self._plain(self._last)

    def update(self, state: ProgressState) -> None:
        """Redraw the line, or print one if the last is ``PLAIN_INTERVAL_S`` old."""
        if self._console.is_terminal:
            self._live.update(Text(self._line(state)), refresh=True)
        elif state.elapsed_s - self._last_plain_s >= PLAIN_INTERVAL_S:
            self._plain(state)
        else:
            self._last = state

    def _plain(self, state: ProgressState) -> None:
        self._last_plain_s = state.elapsed_s
        self._last = None
        self._console.print(self._line(state), highlight=False, soft_wrap=True)

    def _line(self, state: ProgressState) -> str:
        left = f"  about {self._left_s(state):.0f} s left" if self._left_s else ""
        return state.line(self._label) + left
