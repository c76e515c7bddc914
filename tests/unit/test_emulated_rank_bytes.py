"""Bytes that each rank of an emulated engine moves, compared with the table in the docs."""

from pathlib import Path

import pytest
from tests.emulated_cluster import Cluster, cluster
from tests.unit.test_emulated_ranks import SHAPES, Ranks

from dualpath.core.modes import Mode
from dualpath.engine.counters import Counter
from dualpath.transport.contract import Direction

PROMPT = list(range(1, 98))


def agents(made: Cluster, engine: str) -> list[str]:
    """The agents of an engine's ranks, the first rank's first."""
    manager = made.engines[engine].plane.manager
    return [agent.agent for agent in manager.address("").agents]


def moved(made: Cluster, agent: str) -> dict[str, int]:
    """Bytes an agent has posted: copies within its engine, writes to and reads from others."""
    posted = made.transports[agent].posted
    others = [(peer, way) for peer, way in posted if peer != agent]
    return {
        "copies": sum(posted[agent, way] for way in Direction),
        "writes": sum(posted[key] for key in others if key[1] is Direction.WRITE),
        "reads": sum(posted[key] for key in others if key[1] is Direction.READ),
    }


def at(made: Cluster, agent: str, way: Direction) -> int:
    """Bytes that other agents have posted to or from an agent."""
    return sum(t.posted[agent, way] for name, t in made.transports.items() if name != agent)


@pytest.mark.parametrize("mode", [Mode.BASIC, Mode.ROUND_ROBIN])
@pytest.mark.parametrize("ranks", SHAPES, ids=lambda r: f"PE{r.pe} DE{r.de} {r.heads} heads")
async def test_each_rank_moves_its_share_of_the_planned_bytes(
    ranks: Ranks, mode: Mode, tmp_path: Path
) -> None:
    """With alternating reads, the second and third turns have hits at the PE and at the DE."""
    async with cluster(
        *(tmp_path, mode), prefill_tp=ranks.pe, decode_tp=ranks.de, kv_heads=ranks.heads
    ) as made:
        context = PROMPT
        for _ in range(3):
            tokens, _ = await made.ask(context, 5)
            await made.stored()
            context = [*context, *tokens, 7]
        await made.idle()
        pe, de = (made.engines[name].plane.manager for name in ("prefill-0", "decode-0"))
        counted, filled = pe.counters.snapshot(), de.counters.snapshot()
        slices, replicas = min(ranks.pe, ranks.heads), ranks.pe // min(ranks.pe, ranks.heads)
        # Each byte of the whole model once, as in the plan's steps.
        pe_hits = counted[Counter.H2D_BYTES] / replicas
        de_hits = counted[Counter.DE_TO_PE_BYTES] / replicas
        sent = counted[Counter.PE_TO_DE_BYTES]
        assert (de_hits > 0) == (mode is Mode.ROUND_ROBIN)
        # Ranks with the same KV alternate blocks: at most one block more or less in each pass.
        turns = 3 * pe.geometry.full_block_bytes if replicas > 1 else 0
        for agent in agents(made, "prefill-0"):
            own = moved(made, agent)
            assert own["copies"] == pe_hits / slices
            assert own["reads"] == de_hits / slices
            assert abs(own["writes"] - sent / ranks.pe) <= turns
        # A rank with several partners alternates layers between them.
        partners = [
            [agent.agent for agent in de.address("").agents_for(rank, ranks.pe)]
            for rank in range(ranks.pe)
        ]
        several = any(len(of_rank) > 1 for of_rank in partners)
        uneven = max(sent, de_hits) * replicas / pe.geometry.layers if several else turns
        for agent in agents(made, "decode-0"):
            share = sum(1 / len(p) for p in partners if agent in p) / ranks.pe
            if max(ranks.pe, ranks.de) % min(ranks.pe, ranks.de) == 0:
                assert share == pytest.approx(1 / ranks.de)
            assert abs(at(made, agent, Direction.WRITE) - sent * share) <= uneven
            read = at(made, agent, Direction.READ)
            assert abs(read - de_hits * replicas * share) <= uneven
        de_slices = min(ranks.de, ranks.heads)
        h2d = filled[Counter.H2D_BYTES] / (ranks.de // de_slices)
        d2h = filled[Counter.D2H_BYTES]
        for agent in agents(made, "decode-0"):
            copies = moved(made, agent)["copies"] - h2d / de_slices
            assert 0 <= copies <= d2h
        total = sum(moved(made, agent)["copies"] for agent in agents(made, "decode-0"))
        assert total == filled[Counter.H2D_BYTES] + d2h
