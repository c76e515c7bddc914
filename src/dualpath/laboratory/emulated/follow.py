"""A follower rank of an emulated engine, which does its share of the work that rank 0 sends."""

import logging

from dualpath.core.cluster import Role
from dualpath.core.errors import DualPathError
from dualpath.engine.surroundings import LIVE, Surroundings
from dualpath.laboratory.emulated.decode_steps import RankSteps
from dualpath.laboratory.emulated.passes import RankPasses
from dualpath.laboratory.emulated.rank_plane import FollowerPlane
from dualpath.laboratory.emulated.ranks import FollowerRank, LeaderRank, OnlyRank, ThreadRanks
from dualpath.laboratory.emulated.settings import EmulatedSettings

log = logging.getLogger(__name__)


def follow(
    settings: EmulatedSettings, end: FollowerRank, surroundings: Surroundings = LIVE
) -> None:
    """Run a follower rank until rank 0 ends the engine.

    Raises ``ConfigError`` for HBM that cannot be allocated, ``EngineLostError`` if another rank has
    ended.
    """
    run_follower(FollowerPlane(settings, end, surroundings), end)


def run_follower(plane: FollowerPlane, end: FollowerRank) -> None:
    """Run a follower rank with an existing plane; see ``follow``."""
    prefills = plane.settings.engine.role is Role.PREFILL
    share: RankPasses | RankSteps = RankPasses(plane) if prefills else RankSteps(plane)
    plane.follower.watch()
    try:
        while (work := end.work()) is not None:
            share.run(work)
    finally:
        share.close()
        plane.follower.close()


def start_thread_ranks(settings: EmulatedSettings, surroundings: Surroundings = LIVE) -> LeaderRank:
    """Start the other ranks of an engine as threads of this process; return rank 0's interface."""
    size = settings.tensor_parallel_size
    if size == 1:
        return OnlyRank()
    ranks = ThreadRanks(size, surroundings.threads)

    def run(end: FollowerRank) -> None:
        reason = f"rank {end.rank} has ended"
        try:
            follow(settings, end, surroundings)
        except DualPathError as error:
            reason = f"rank {end.rank} has ended: {error}"
            log.critical("%s", reason)
        finally:
            ranks.rank_ended(reason)

    for end in ranks.followers:
        surroundings.threads.start(f"{settings.engine.engine_id}-follows", lambda end=end: run(end))  # type: ignore[misc]
    return ranks.leader
