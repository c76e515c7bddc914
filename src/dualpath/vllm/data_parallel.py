"""An engine as one rank of a vLLM data-parallel group, with any load balancing (§A.4).

Each rank is an engine of its own, with one device, one scheduler and one data plane.  Ranks compute
in lock step, so a rank that ends takes the others down with it.  vLLM always starts all ranks of a
group together; while they start, they agree on the group's name and epoch with vLLM's own process
group.  If several ranks share one API server, a request header selects the rank.
"""

import uuid
from typing import TYPE_CHECKING

from vllm.distributed.parallel_state import get_dp_group

from dualpath.core.cluster import GroupRank, rank_mark

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


def engine_id_of_rank(engine_id: str, parallel: "ParallelConfig") -> str:
    """Return the engine id of a rank: the configured id, with the rank appended in a group."""
    if parallel.data_parallel_size == 1 and parallel.data_parallel_index == 0:
        return engine_id
    return engine_id + rank_mark(parallel.data_parallel_index)


def agree_on_group(engine_id: str, parallel: "ParallelConfig") -> GroupRank | None:
    """Return this engine's place in its data-parallel group, None without a group.

    All ranks call this once at start and wait for each other.  The group takes the name that its
    first rank proposes.
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
    """Describe why ranks of this group cannot be engines of a cluster."""
    problems = []
    # Ranks of a dense model compute independently, and vLLM hides the others from each of them.
    if parallel.data_parallel_size == 1 and parallel.data_parallel_index > 0:
        problems.append(
            f"rank {parallel.data_parallel_index} of independent replicas of a dense model: the "
            "first replica cannot see that it shares its server; leave --data-parallel-size out "
            "and start one server per replica"
        )
    if parallel.enable_elastic_ep:
        problems.append("a group of variable size; leave --enable-elastic-ep out")
    return problems


def _number_at_server(parallel: "ParallelConfig") -> int | None:
    """Return the value of ``X-data-parallel-rank`` that selects this rank at its API server.

    None if the rank has a server of its own; vLLM counts local ranks from 0.
    """
    if parallel.data_parallel_external_lb:
        return None
    if parallel.data_parallel_hybrid_lb:
        return parallel.data_parallel_rank_local
    return parallel.data_parallel_rank
