"""Sees what the buffer of a simulated engine keeps and brings back for next turns."""

from collections.abc import Callable

from dualpath.engine.traffic_manager import TrafficManager
from dualpath.laboratory.chaos.simulation.world import World


def watch_fetches(name: str, manager: TrafficManager, world: World) -> None:
    """Make it a problem to bring back a block that no order keeps when its read begins."""
    reader, kept = manager._requests._reader, manager.buffer._pool.cached
    begin = reader._next_fetch

    def noted() -> Callable[[str], None] | None:
        key = next(iter(reader._to_fetch))
        if key not in kept._retained:
            world.problem(f"{name}: block {key.hex()[:8]} is brought back for nobody")
        return begin()

    reader._next_fetch = noted  # type: ignore[method-assign]
