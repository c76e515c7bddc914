"""What the router's /metrics says after a small emulated cluster has served a few requests."""

from collections.abc import Mapping
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from tests.emulated_cluster import GEOMETRY, Cluster, cluster
from tests.guard import GUARD_S

from dualpath.core.blocks import block_keys
from dualpath.core.modes import Mode
from dualpath.router.settings import LinkSettings, RouterSettings
from dualpath_lab.emulated.router_server import emulated_front_end

#: 12 Full Blocks of 4 tokens, and a token.
PROMPT = list(range(1, 50))
TURNS = 3
GENERATED_TOKENS = 4
GOOD_BLOCKS = 3


class Scrape:
    """Families by the names that queries use for them, and their samples.

    Without the ``_created`` gauges that the client library adds to counters and histograms.
    """

    def __init__(self, text: str) -> None:
        parsed: list[Metric] = list(text_string_to_metric_families(text))
        families = [family for family in parsed if not family.name.endswith("_created")]
        self.families = {f.name + ("_total" if f.type == "counter" else ""): f for f in families}
        self.samples = [sample for family in families for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """Sum of the samples with labels that contain these."""
        found = [s for s in self.samples if s.name == name and labels.items() <= s.labels.items()]
        return sum(sample.value for sample in found)

    def labels(self, name: str) -> Mapping[str, set[str]]:
        """Labels of a sample name with the values they take; raises ``KeyError`` if unknown."""
        found = [s.labels for s in self.samples if s.name == name]
        if not found:
            raise KeyError(name)
        return {label: {labels[label] for labels in found} for label in found[0]}


async def scrape_after_three_turns(directory: Path) -> Scrape:
    """A new prompt, the same again, and once more with its fourth block damaged; all is read."""
    router = RouterSettings(mode=Mode.DUALPATH, dram_tier=False, front_ends_port=0)
    async with cluster(
        directory, Mode.DUALPATH, router=router, snic_bytes_per_s=1e9, storage_quota=1 << 30
    ) as made:
        for engine in made.engines.values():  # As engines of vLLM measure their passes.
            engine.plane.manager.attention.passed(0.1, 0.2, 0, 1)
        for turn in range(TURNS):
            if turn == TURNS - 1:
                damage_block(directory, GOOD_BLOCKS)
            await made.ask(PROMPT, GENERATED_TOKENS)
            await made.stored()
        await made.idle()
        await all_reported(made)
        await made.arrivals.until(
            lambda: any(s.report and s.report.storage for s in made.service.registry.all()), GUARD_S
        )
        async with made.http.get(f"{made.endpoint}/metrics") as response:
            assert response.content_type == "text/plain"
            return Scrape(await response.text() + await _of_units(made))


async def _of_units(made: Cluster) -> str:
    """Return the metrics of units that a front end of this scheduler and of a lost one has."""
    scheduler = made.service.scheduler.front_ends.address
    link = LinkSettings(scheduler=f"{scheduler},tcp://127.0.0.1:1")
    async with emulated_front_end(RouterSettings(), link, "127.0.0.1", 0) as (_, service):
        await service.wait_ready(1, 1, GUARD_S)
        lines = service.exposition().decode().splitlines()
    return "".join(f"{line}\n" for line in lines if "dualpath:unit_" in line)


async def all_reported(made: Cluster) -> None:
    """Wait until the router has received all that the engines have counted."""
    counted = {
        engine_id: engine.plane.manager.counters.snapshot().items()
        for engine_id, engine in made.engines.items()
    }

    def reported() -> bool:
        states = made.service.registry.all()
        return all(
            state.report is not None
            and counted[state.info.engine_id] <= state.report.counters.items()
            for state in states
        )

    await made.arrivals.until(reported, GUARD_S)


def damage_block(directory: Path, index: int) -> None:
    """Spoil the payload of one of the prompt's blocks in storage."""
    key = list(block_keys(PROMPT, GEOMETRY.block_tokens))[index]
    (path,) = directory.rglob(f"{key.hex()}.kv")
    path.write_bytes(path.read_bytes()[:-8] + b"\xff" * 8)
