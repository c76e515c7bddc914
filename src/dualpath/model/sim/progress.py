"""How a run tells how far it is."""

from collections.abc import Callable

Progress = Callable[[int, int, float], None]
"""Called now and then with (rounds finished, rounds in all, virtual seconds)."""
