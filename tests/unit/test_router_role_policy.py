"""The simulator's policy over live engines: it asks for a switch when one pays."""

import asyncio

import pytest
from tests.unit.router_cluster import cluster
from tests.unit.router_fakes import job

from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.core.request import Request
from dualpath.policy.rebalance import RebalanceSettings, RoleQueue
from dualpath.router.scheduler.roles import LiveRolePolicy, Roles
from dualpath.router.settings import RouterSettings

OPTIONS = {"interval_s": 10.0, "patience": 2.0, "prefill_node_tokens_per_s": 100.0}
SETTINGS = RebalanceSettings(
    interval_s=10.0, patience=2, prefill_node_tokens_per_s=100.0, switch_s=1.0
)


def queues(prefill_tokens: int) -> dict[Role, RoleQueue]:
    return {
        Role.PREFILL: RoleQueue(prefill_tokens, 0, 0),
        Role.DECODE: RoleQueue(0, 0, 0),
    }


async def test_prompts_that_pile_up_call_a_decode_engine_once_that_is_patient() -> None:
    now_s = 0.0
    async with cluster(prefill=1, decode=2) as made:
        roles = Roles(made.service.registry, lambda: now_s, 100.0)
        policy = LiveRolePolicy(SETTINGS, roles, lambda: now_s)
        policy.loaded("old", 10)
        policy.prefilled("old", 10)
        now_s = 10.0
        policy.tick(queues(0).__getitem__)
        assert roles.policy_reason == "unmeasured"
        policy.over("old")  # it stayed for 10 s: now the rate of decode nodes is known
        policy.loaded("large", 100_000)
        now_s = 20.0
        policy.tick(queues(100_000).__getitem__)
        policy.tick(queues(100_000).__getitem__)  # not time yet
        assert (roles.policy_reason, roles.current) == ("patience", None)
        now_s = 30.0
        policy.tick(queues(100_000).__getitem__)
        assert roles.current is not None
        assert (roles.current.to_role, roles.current.reason) == (Role.PREFILL, "prefill-bound")


async def test_the_router_reports_the_progress_of_requests_to_the_policy() -> None:
    settings = RouterSettings(rebalance=True, rebalance_options=OPTIONS)
    async with cluster(settings=settings) as made:
        policy = made.service.scheduler.role_policy
        assert policy is not None
        await made.run(job("a", range(100)))
        await made.settled()
        assert len(policy._policy._stays_s) == 1
        assert policy._policy._since_s == {}
        assert made.service.scheduler.dispatch.queue(Role.DECODE) == RoleQueue(0, 0, 0)


@pytest.mark.parametrize("options", [{"intervall_s": 1.0}, {"margin": 0.5}, {"ttft_slo_s": 1.0}])
def test_options_that_the_policy_does_not_have_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        RouterSettings(rebalance_options=options)


async def test_a_request_that_waits_for_a_decode_engine_weighs_there_what_it_may_generate() -> None:
    async with cluster() as made:
        dispatch = made.service.scheduler.dispatch
        for engine_id in ("p0", "d0"):
            dispatch.pause(engine_id, paused=True)
        request = Request(request_id="a", prompt_tokens=100, hit_tokens=0, max_new_tokens=1000)
        waiting = asyncio.create_task(dispatch.place(request))
        await asyncio.sleep(0)
        assert dispatch.queue(Role.PREFILL) == RoleQueue(0, 1, 100)
        # 256 generated tokens at most, as for the simulator's.
        assert dispatch.queue(Role.DECODE) == RoleQueue(0, 1, 356)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
