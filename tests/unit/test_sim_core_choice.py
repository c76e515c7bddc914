"""Which core plays a run, and what the compiled one refuses."""

import importlib
import importlib.util
import inspect
import subprocess
import sys
from typing import Any

import pytest
from tests.simulated import agents_of, growing_agent, small_setup

from dualpath.core.errors import ConfigError
from dualpath.core.modes import Handover, Mode
from dualpath.policy.rebalance import RebalanceSettings
from dualpath_sim.simulator import rules as run_rules
from dualpath_sim.simulator import run
from dualpath_sim.simulator.run import simulate

AGENTS = agents_of(growing_agent(4, 100, 50, 5))
BEYOND: dict[str, Any] = {
    "dram_tier_bytes": 0.0,
    "recompute_limit_s": 1.0,
    "append_at_decode_tokens": 1,
    "handover": Handover.HBM,
    "third_engine_reads": 1,
    "rebalancing": RebalanceSettings(),
    "snic_sharing": "equal",
}


@pytest.fixture
def compiled_runs(monkeypatch):
    """Count the runs of the compiled core, which plays none, for whatever size a run has."""
    runs = []

    class Compiled:
        def run_compiled(self, setup, agents, **_options):
            runs.append(setup)

    monkeypatch.setattr(importlib, "import_module", lambda name: Compiled())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    return runs


def test_a_small_run_takes_the_reference_core_and_does_not_import_numba():
    script = (
        "import sys; from tests.simulated import agents_of, small_setup\n"
        "from dualpath_sim.simulator.run import simulate\n"
        "simulate(small_setup(), agents_of([(64, 0, 3)]))\n"
        "sys.exit('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize("mode", list(Mode))
def test_a_large_run_of_the_papers_system_takes_the_compiled_core(mode, compiled_runs, monkeypatch):
    monkeypatch.setattr(run, "SMALL_RUN_ROUNDS", AGENTS.rounds - 1)
    simulate(small_setup(mode), AGENTS)
    assert len(compiled_runs) == 1


@pytest.mark.parametrize("name", BEYOND)
def test_what_only_the_reference_core_knows_takes_it_whatever_the_size(
    name, compiled_runs, monkeypatch
):
    monkeypatch.setattr(run, "SMALL_RUN_ROUNDS", 0)
    result = simulate(small_setup(**{name: BEYOND[name]}), AGENTS)
    assert (result.turns.finished_ns > 0).all()
    assert not compiled_runs


@pytest.mark.parametrize("name", BEYOND)
def test_the_compiled_core_names_what_it_does_not_know_and_the_remedy(name, compiled_runs):
    with pytest.raises(ConfigError, match=rf"{name}.* is set.*core.* auto or use .*reference"):
        simulate(small_setup(**{name: BEYOND[name]}), AGENTS, core="compiled")
    assert not compiled_runs


def test_without_numba_a_large_run_takes_the_reference_core(monkeypatch):
    monkeypatch.setattr(run, "SMALL_RUN_ROUNDS", 0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert (simulate(small_setup(), AGENTS).turns.finished_ns > 0).all()


def test_only_code_changes_what_the_compiled_loop_is_cached_by(monkeypatch):
    """Comments, docstrings and positions do not: nothing is compiled again for them."""
    pytest.importorskip("numba")
    from dualpath_sim.simulator.compiled import core, jit

    source, digest = inspect.getsource, jit.digest(core.run_events.py_func)
    for old, new, changes in (
        ('"""Round a duration', '"""A docstring.\n\n    """\n    # A comment.\n    """', False),
        ("def to_ns(", "def of_no_use():\n    return 1\n\n\ndef to_ns(", False),
        ("NS_PER_S + 0.5)", "NS_PER_S + 0.25)", True),
    ):
        assert old in source(run_rules)
        monkeypatch.setattr(
            inspect,
            "getsource",
            lambda module, old=old, new=new: source(module).replace(old, new),
        )
        assert (jit.digest(core.run_events.py_func) != digest) == changes
