"""Bytes that each rank of emulated data-parallel groups moves, compared with its prompts' plans."""

from collections import Counter as Tally
from pathlib import Path
from typing import Any

import pytest
from tests.emulated_cluster import GEOMETRY, cluster
from tests.unit.test_emulated_rank_bytes import agents, moved

from dualpath.core.cluster import GroupRank, Role
from dualpath.core.modes import Mode
from dualpath.core.request import Request
from dualpath.engine.counters import BYTES_OF, Counter
from dualpath.plan.movements import Place
from dualpath.plan.steps import PromptLayout, Step, whole_plan
from dualpath.policy.events import Assignment
from dualpath.router.settings import RouterSettings
from dualpath_lab.emulated import process
from dualpath_lab.emulated.settings import EmulatedSettings

RANKS = 2
AGENTS, TURNS = 4, 3
#: Generated blocks, which belong to no prompt step, are counted here as well.
OF_GENERATED = {Counter.STORAGE_WRITE_BYTES, Counter.D2H_BYTES}
AT_PREFILL = {Place.PE_BUFFER, Place.PE_HBM}


def join_group(settings: EmulatedSettings) -> GroupRank:
    """All ranks run in this process, so the start needs no waiting."""
    group, _, rank = settings.engine.engine_id.rpartition("-")
    return GroupRank(group, "start", int(rank), RANKS)


def steps_of(request: Request, assignment: Assignment) -> list[Step]:
    """The plan of a prompt, which is computed in one pass."""
    return list(whole_plan(PromptLayout(GEOMETRY, request.prompt_tokens, assignment.reads)))


@pytest.mark.parametrize("mode", [Mode.BASIC, Mode.ROUND_ROBIN])
async def test_each_rank_of_a_group_moves_the_planned_bytes_of_its_prompts(
    mode: Mode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "join_group", join_group)
    router = RouterSettings(mode=mode, dram_tier=False)
    whole_prompts: dict[str, Any] = {"batch_cap_tokens": 512, "compute_quota_s": 0.0}
    async with cluster(tmp_path, mode, RANKS, RANKS, router=router, **whole_prompts) as made:
        assert all(info.dp is not None for info in made.service.registry.alive())
        for agent in range(AGENTS):
            context = [agent, *range(1, 98)]
            for _ in range(TURNS):
                tokens, _ = await made.ask(context, 5)
                await made.stored()
                context = [*context, *tokens, 7]
        await made.idle()
        planned: dict[str, Tally[str]] = {name: Tally() for name in made.engines}
        for placed in made.service.scheduler.dispatch.recent:
            assignment = placed.assignment
            assert assignment is not None
            for step in steps_of(placed.request, assignment):
                at_prefill = {step.source, step.destination} & AT_PREFILL
                engine = assignment.at(Role.PREFILL if at_prefill else Role.DECODE).engine_id
                planned[engine].update(dict.fromkeys(BYTES_OF[step.label], step.bytes))
        for name, running in made.engines.items():
            counted = running.plane.manager.counters.snapshot()
            assert min(planned[name].values()) > 0
            for counter, step_bytes in planned[name].items():
                assert counter in OF_GENERATED or counted[counter] == step_bytes, counter
            (agent_name,) = agents(made, name)
            copied = counted[Counter.H2D_BYTES] + counted[Counter.D2H_BYTES]
            assert moved(made, agent_name) == {
                "copies": copied,
                "writes": counted[Counter.PE_TO_DE_BYTES],
                "reads": counted[Counter.DE_TO_PE_BYTES],
            }
