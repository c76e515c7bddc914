"""A rank of an emulated engine that follows: it does its share of the work that the first gives."""

import logging

from dualpath.core.cluster import Role
from dualpath.core.errors import DualPathError
from dualpath.engine.surroundings import LIVE, Surroundings
from dualpath.laboratory.emulated.decode_steps import RankSteps
from dualpath.laboratory.emulated.passes import RankPasses
from dualpath.laboratory.emulated.rank_plane import FollowerPlane
from dualpath.laboratory.emulated.ranks import FollowingEnd, LeadingEnd, NoFollowers, ThreadRanks
from dualpath.laboratory.emulated.settings import EmulatedSettings

log = logging.getLogger(__name__)


def follow(
    settings: EmulatedSettings, end: FollowingEnd, surroundings: Surroundings = LIVE
) -> None:
    """Follow until there is no more work.

    Raises ``ConfigError`` for what this rank cannot have, ``EngineLostError`` if another rank is
    gone.
    """
    follow_with(FollowerPlane(settings, end, surroundings), end)


def follow_with(plane: FollowerPlane, end: FollowingEnd) -> None:
    """Follow with what a rank has; see ``follow``."""
    prefills = plane.settings.engine.role is Role.PREFILL
    share: RankPasses | RankSteps = RankPasses(plane) if prefills else RankSteps(plane)
    plane.follower.watch()
    try:
        while (work := end.work()) is not None:
            share.run(work)
    finally:
        share.close()
        plane.follower.close()


def ranks_as_threads(settings: EmulatedSettings, surroundings: Surroundings = LIVE) -> LeadingEnd:
    """Start the other ranks of an engine on threads of this process; return the first one's end."""
    size = settings.tensor_parallel_size
    if size == 1:
        return NoFollowers()
    ranks = ThreadRanks(size, surroundings.threads)

    def run(end: FollowingEnd) -> None:
        reason = f"rank {end.rank} has ended"
        try:
            follow(settings, end, surroundings)
        except DualPathError as error:
            reason = f"rank {end.rank} has ended: {error}"
            log.critical("%s", reason)
        finally:
            ranks.ended(reason)

    for end in ranks.followers:
        surroundings.threads.start(f"{settings.engine.engine_id}-follows", lambda end=end: run(end))  # type: ignore[misc]
    return ranks.leader
