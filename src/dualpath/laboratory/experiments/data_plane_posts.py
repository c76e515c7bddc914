"""Cost of posting a transfer by its number of pieces (the doorbell batching of §5.2)."""

import os
import time
from statistics import median

import numpy as np
from numpy.typing import NDArray

from dualpath.laboratory.experiments.data_plane_settings import DataPlaneSettings, PostCost
from dualpath.laboratory.experiments.raw_nixl import RawAgent
from dualpath.transport.regions import check_pair

#: Pieces of a region; larger transfers use some of them repeatedly.
_POOL_PIECES = 1000
#: Number of posts per size: about this many pieces in total, within these limits.
_PIECES_IN_ALL, _LEAST_POSTS, _MOST_POSTS = 5000, 5, 100


def measure_posts(settings: DataPlaneSettings) -> list[PostCost]:
    """Return the costs of WRITEs between two agents of this process, medians.

    Pieces are scattered at both ends, so that NIXL cannot merge any.
    """
    os.environ["UCX_TLS"] = settings.tls
    here, there = (
        RawAgent(f"posts-{end}", _POOL_PIECES, settings.layer_block_bytes, tuned=True)
        for end in ("here", "there")
    )
    here.connect(there.peer())
    scattered = np.random.default_rng(0).permutation(_POOL_PIECES)
    costs = [
        _cost(here, there, np.resize(scattered, pieces)) for pieces in settings.descriptor_counts
    ]
    here.close()
    there.close()
    return costs


def _cost(here: RawAgent, there: RawAgent, indices: NDArray[np.int64]) -> PostCost:
    """Time the steps of ``NixlTransport.post``."""
    own, others = here.peer().region, there.peer().region
    taken = []
    posts = min(_MOST_POSTS, max(_LEAST_POSTS, _PIECES_IN_ALL // len(indices)))
    for _ in range(posts + 1):
        start_s = time.perf_counter()
        checked, checked_there = check_pair(own, indices, others, indices)
        checked_s = time.perf_counter()
        handle = here.make("WRITE", checked.astype(np.int32), checked_there.astype(np.int32))
        made_s = time.perf_counter()
        here.post(handle)
        posted_s = time.perf_counter()
        here.finish(handle)
        taken.append((checked_s - start_s, made_s - checked_s, posted_s - made_s))
    check_s, make_s, post_s = (median(column) for column in zip(*taken[1:], strict=True))
    return PostCost(
        len(indices), check_s, make_s, post_s
    )  # the first post, which connects, is left out
