"""α and β follow from what the prefill engines say of themselves, live."""

import asyncio
import math
from pathlib import Path

import msgspec
import pytest
from tests.emulated_cluster import cluster as emulated_cluster
from tests.unit.router_cluster import cluster
from tests.unit.router_fakes import NAMESPACE, expected, job

from dualpath.core.cluster import Role
from dualpath.core.errors import EngineRefusedError
from dualpath.core.modes import Mode
from dualpath.core.rates import Rate, RateOrigin, Rates, RecomputeWeight
from dualpath.policy.event_log import assignments, difference
from dualpath.policy.events import TYPICAL_COMPUTED_WEIGHT, SetThresholds
from dualpath.router.scheduler.event_recorder import read_event_log
from dualpath.router.scheduler.registry import Registry
from dualpath.router.settings import RouterSettings

PROMPT = list(range(100, 118))
BYTES_PER_TOKEN = NAMESPACE.geometry.bytes_per_token
UNKNOWN = {"tokens": None, "origin": "default"}


def rates(read_tokens: float, prefill_tokens: float, origin: RateOrigin) -> Rates:
    """Return rates in tokens per second."""
    return Rates(Rate(read_tokens * BYTES_PER_TOKEN, origin), Rate(prefill_tokens, origin))


@pytest.mark.virtual_time
async def test_the_slowest_prefill_engine_that_is_there_sets_both():
    async with cluster(prefill=0) as made:
        status = made.service.status
        assert (status()["alpha"], status()["beta"]) == (UNKNOWN, UNKNOWN)
        await made.add("p0", Role.PREFILL, rates=rates(100, 0.2, RateOrigin.MEASURED))
        assert status()["alpha"] == {"tokens": 300, "origin": "measured by engine p0"}
        assert status()["beta"] == {"tokens": 1, "origin": "measured by engine p0"}
        await made.add("p1", Role.PREFILL, rates=rates(10, 1000, RateOrigin.FILE))
        await made.add("d1", Role.DECODE, rates=rates(1, 1, RateOrigin.MEASURED))
        assert status()["alpha"] == {"tokens": 30, "origin": "profile file of engine p1"}
        assert status()["beta"] == {"tokens": 1, "origin": "measured by engine p0"}
        made.lose("p0")
        assert status()["beta"] == {"tokens": 5000, "origin": "profile file of engine p1"}
        made.lose("p1")
        assert (status()["alpha"], status()["beta"]) == (UNKNOWN, UNKNOWN)
        (p1,) = [e for e in status()["engines"] if e["engine_id"] == "p1"]
        assert p1["rates"]["prefill_tokens"] == {"per_s": 1000, "origin": "file"}


@pytest.mark.virtual_time
async def test_the_engine_that_sets_beta_reports_the_weight_of_a_computed_token():
    async with cluster(prefill=0) as made:

        def weights() -> tuple[float, RecomputeWeight | None]:
            thresholds = made.service.scheduler.thresholds.for_scheduler()
            return thresholds.computed_weight, thresholds.recompute_weight

        assert weights() == (TYPICAL_COMPUTED_WEIGHT, None)
        by_position = RecomputeWeight(2.0, 0.5)
        short = msgspec.structs.replace(
            rates(100, 10, RateOrigin.MEASURED), computed_weight=2.5, recompute_weight=by_position
        )
        await made.add("p0", Role.PREFILL, rates=short)
        await made.add("p1", Role.PREFILL, rates=rates(100, 1000, RateOrigin.FILE))
        assert weights() == (2.5, by_position)
        made.lose("p0")
        assert weights() == (TYPICAL_COMPUTED_WEIGHT, None)
    # A beta that is set is that of the paper's turn, whatever engines say.
    async with cluster(prefill=0, settings=RouterSettings(beta_tokens=100)) as made:
        await made.add("p0", Role.PREFILL, rates=short)
        thresholds = made.service.scheduler.thresholds.for_scheduler()
        assert thresholds.computed_weight == TYPICAL_COMPUTED_WEIGHT
        assert thresholds.recompute_weight is None


@pytest.mark.virtual_time
async def test_what_waits_for_a_slow_engine_goes_on_when_only_fast_ones_are_left(tmp_path: Path):
    log = tmp_path / "events.jsonl"
    settings = RouterSettings(event_log=str(log))
    async with cluster(prefill=0, settings=settings) as made:
        await made.add("p0", Role.PREFILL, rates=rates(100, 0.2, RateOrigin.MEASURED))
        await made.add("p1", Role.PREFILL, rates=rates(100, 1000, RateOrigin.MEASURED))
        made.calls.gates["prefill"] = asyncio.Event()
        runs = [asyncio.create_task(made.run(job(f"r{i}", PROMPT))) for i in range(4)]
        await made.arrives("prefill")
        while made.service.scheduler.dispatch.waiting < 2:  # beta is 1: one for each PE
            await asyncio.sleep(0)
        await made.engines["p0"].kill()
        made.lose("p0")
        while made.service.scheduler.dispatch.waiting:
            await asyncio.sleep(0)
        made.calls.gates["prefill"].set()
        assert await asyncio.gather(*runs) == [expected(PROMPT, 6)] * 4
    recorded = read_event_log(log)
    assert sum(isinstance(entry.event, SetThresholds) for entry in recorded.entries) == 2
    assert len(assignments(recorded)) >= 4
    assert difference(recorded) is None


@pytest.mark.virtual_time
async def test_the_status_shows_the_age_of_a_stored_rate():
    async with cluster(prefill=0) as made:
        old = Rate(1000, RateOrigin.REMEMBERED, age_s=5400)
        await made.add("p0", Role.PREFILL, rates=Rates(prefill_tokens=old))
        status = made.service.status()
        assert status["beta"]["origin"] == (
            "measured by engine p0 at an earlier start, 1.5 h before it joined"
        )
        (p0,) = [e for e in status["engines"] if e["engine_id"] == "p0"]
        assert p0["rates"]["prefill_tokens"]["age_s"] == 5400


@pytest.mark.virtual_time
async def test_what_is_set_overrides_what_is_measured():
    async with cluster(
        settings=RouterSettings(alpha_tokens=7, beta_tokens=9),
        rates=rates(100, 100, RateOrigin.MEASURED),
    ) as made:
        status = made.service.status()
        assert status["alpha"] == {"tokens": 7, "origin": "setting"}
        assert status["beta"] == {"tokens": 9, "origin": "setting"}


async def test_an_emulated_engine_reports_its_costs_and_its_throttle(tmp_path: Path):
    async with emulated_cluster(tmp_path, Mode.DUALPATH, snic_bytes_per_s=1e9) as made:
        status = made.service.status()
        (pe,) = [e for e in status["engines"] if e["role"] == "prefill"]
        tokens_per_s = pe["rates"]["prefill_tokens"]["per_s"]
        name = pe["engine_id"]
        assert status["beta"] == {
            "tokens": int(5 * tokens_per_s), "origin": f"costs of emulated engine {name}"
        }  # fmt: skip
        assert status["alpha"]["origin"] == f"snic_bytes_per_s of engine {name}"


@pytest.mark.virtual_time
@pytest.mark.parametrize("per_s", [0.0, -1.0, math.nan, math.inf])
async def test_a_rate_that_cannot_be_is_refused(per_s):
    async with cluster(prefill=0) as made:
        hello = made.engines["d0"].hello()
        bad = Rates(prefill_tokens=Rate(per_s, RateOrigin.MEASURED))
        with pytest.raises(EngineRefusedError, match=r"rate of .* above 0 and finite"):
            Registry().admit(msgspec.structs.replace(hello, rates=bad))


@pytest.mark.virtual_time
@pytest.mark.parametrize("weight", [0.5, 1e10, math.nan, math.inf])
async def test_a_weight_of_computed_tokens_that_cannot_be_is_refused(weight):
    async with cluster(prefill=0) as made:
        hello = made.engines["d0"].hello()
        with pytest.raises(EngineRefusedError, match=r"computed_weight of .* between 1 and 1e\+09"):
            Registry().admit(msgspec.structs.replace(hello, rates=Rates(computed_weight=weight)))


@pytest.mark.virtual_time
@pytest.mark.parametrize("weight", [(-1.0, 0.0), (1.0, math.nan), (math.inf, 0.0)])
async def test_a_weight_of_recomputed_tokens_that_cannot_be_is_refused(weight):
    async with cluster(prefill=0) as made:
        hello = made.engines["d0"].hello()
        bad = Rates(recompute_weight=RecomputeWeight(*weight))
        with pytest.raises(EngineRefusedError, match=r"RecomputeWeight.* at least 0 and finite"):
            Registry().admit(msgspec.structs.replace(hello, rates=bad))
