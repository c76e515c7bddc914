"""An engine as one rank of a vLLM data-parallel group, behind whatever load balancing (§A.4).

Each rank is an engine of its own: one device, one scheduler, one data plane.  What they share is
that they compute in lock step, so that one that ends takes the others with it.  vLLM never starts a
rank alone; so ranks agree on a name for this start of their group while they still come up, through
the group in which they will compute.  Where several ranks have one API server, a header of a
request says which of them it is for.
"""

import uuid
from typing import TYPE_CHECKING

from vllm.distributed.parallel_state import get_dp_group

from dualpath.core.cluster import GroupRank, rank_mark

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


def engine_id_of_rank(engine_id: str, parallel: "ParallelConfig") -> str:
    """Return a rank's own name: ranks may have been given one, as they share other settings."""
    if parallel.data_parallel_size == 1 and parallel.data_parallel_index == 0:
        return engine_id
    return engine_id + rank_mark(parallel.data_parallel_index)


def agree_on_group(engine_id: str, parallel: "ParallelConfig") -> GroupRank | None:
    """Return this engine's place in its group, None if it computes on its own.

    All ranks call it once while they come up, and wait for each other.  The group is called what
    its first rank was called.
    """
    if parallel.data_parallel_size == 1:
        return None
    proposed = (engine_id.removesuffix(rank_mark(0)), uuid.uuid4().hex[:12])
    group, epoch = get_dp_group().broadcast_object(proposed, src=0)
    return GroupRank(
        group,
        epoch,
        parallel.data_parallel_rank,
        parallel.data_parallel_size,
        at_server=_number_at_server(parallel),
    )


def group_problems(parallel: "ParallelConfig") -> list[str]:
    """Name what keeps ranks from being engines of a cluster."""
    problems = []
    # Ranks of a dense model compute on their own: vLLM hides from them that there are others.
    if parallel.data_parallel_size == 1 and parallel.data_parallel_index > 0:
        problems.append(
            f"rank {parallel.data_parallel_index} of independent replicas of a dense model, of "
            "which the first cannot know that it shares its server; leave --data-parallel-size "
            "out and start a server for each"
        )
    if parallel.enable_elastic_ep:
        problems.append("a group whose size changes; leave --enable-elastic-ep out")
    return problems


def _number_at_server(parallel: "ParallelConfig") -> int | None:
    """Return what ``X-data-parallel-rank`` has to say: vLLM counts from 0 where ranks are local."""
    if parallel.data_parallel_external_lb:
        return None
    if parallel.data_parallel_hybrid_lb:
        return parallel.data_parallel_rank_local
    return parallel.data_parallel_rank
