"""The experiment on roles: its load, its record of role changes, and its report."""

import statistics

import msgspec
import pytest

from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError, EngineLostError
from dualpath_lab.experiments import roles
from dualpath_lab.experiments.roles import (
    Change,
    LiveRun,
    RoleChangeLog,
    RoleRun,
    prefill_tokens_per_s,
    shifting_agents,
    simulated,
)
from dualpath_lab.experiments.settings import RoleShiftSettings
from dualpath_sim.harness.run import measure

SETTINGS = RoleShiftSettings()


def test_the_load_shifts_from_prompts_to_answers_and_is_reproducible() -> None:
    agents = shifting_agents(msgspec.structs.replace(SETTINGS, agents=200))
    for phase, rounds in enumerate((slice(0, 6), slice(6, 12))):
        turns = [r for agent in agents for r in agent.trajectory.rounds[rounds]]
        append = statistics.fmean(r.append_tokens for r in turns)
        generated = statistics.fmean(r.generated_tokens for r in turns)
        assert append == pytest.approx(SETTINGS.append_tokens[phase], rel=0.05)
        assert generated == pytest.approx(SETTINGS.generate_tokens[phase], rel=0.05)
    assert shifting_agents(SETTINGS) == shifting_agents(SETTINGS)
    other = msgspec.structs.replace(SETTINGS, seed=1)
    assert shifting_agents(SETTINGS) != shifting_agents(other)


def test_a_third_phase_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes two means"):
        RoleShiftSettings(append_tokens=(1.0, 2.0, 3.0))


def report(switch: str | None, *past: str) -> dict[str, object]:
    """Return a router's report on roles: the current switch's state, and those of past switches."""

    def switch_report(state: str) -> dict[str, object]:
        return {
            "engines": ["pe-0"],
            "to_role": "decode",
            "reason": "decode-bound",
            "state": state,
            "drained_after_s": 1.0,
            "took_s": 3.0,
            "note": "gone",
        }

    return {
        "switch": switch_report(switch) if switch else None,
        "past": [switch_report(state) for state in past],
    }


def test_the_time_of_a_change_begins_when_it_is_first_reported() -> None:
    timeline = RoleChangeLog()
    timeline.update(report(None, "joined"), 1.0)  # from before the run
    timeline.update(report("asked", "joined"), 10.0)
    timeline.update(report("draining", "joined"), 11.0)
    timeline.update(report(None, "joined", "joined"), 14.0)
    timeline.update(report("asked", "joined", "joined"), 20.0)
    assert timeline.changes == [
        Change(Role.DECODE, "decode-bound", 10.0, 11.0, 13.0),
        Change(Role.DECODE, "decode-bound", 20.0),
    ]
    with pytest.raises(EngineLostError, match="pe-0: gone"):
        timeline.update(report(None, "joined", "joined", "lost"), 25.0)


def test_simulated_role_changes_shorten_the_job() -> None:
    policy = msgspec.structs.replace(
        SETTINGS.rebalancing,
        switch_s=2.0,
        prefill_node_tokens_per_s=prefill_tokens_per_s(SETTINGS),
    )
    fixed, moving = simulated(SETTINGS, None), simulated(SETTINGS, policy)
    assert fixed.changes == ()
    assert {change.to_role for change in moving.changes} == {Role.DECODE}
    assert moving.jct_s < 0.7 * fixed.jct_s


def test_the_policys_switch_time_is_measured_and_both_sides_are_in_one_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def play(settings, policy):
        asked.append(policy)
        if policy is None:
            return LiveRun(RoleRun(240.0), 0.4)
        changes = (Change(Role.DECODE, "decode-bound", 40.0, 40.5, 42.0),)
        return LiveRun(RoleRun(130.0, changes), 0.9, 2.0)

    monkeypatch.setattr(roles, "run_live", play)
    found = roles.draw(measure(roles.ROLES, SETTINGS))
    fixed, moving = asked
    assert fixed is None
    assert moving.prefill_node_tokens_per_s == prefill_tokens_per_s(SETTINGS)
    assert found.too_busy
    assert "TOO BUSY" in found.settings[-1]
    times, changes = found.tables
    assert [row[:2] for row in times.rows] == [("fixed roles", "240.0"), ("moving roles", "130.0")]
    # The simulator changes two nodes: the difference is reported and misses its target.
    assert changes.rows[0][:2] == ("decode-bound, to decode", "40.0")
    assert changes.rows[1][1] == "-"
    assert not next(
        t for t in found.results if t.what.startswith("difference in numbers of changes")
    ).met
    measured = found.panels[0].series[0]
    assert (measured.x, measured.y) == ((0.0, 40.0, 130.0), (3.0, 2.0, 2.0))
