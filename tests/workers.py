"""Which tests may run at the same time on the two workers of `make test`.

Tests that start engines, routers and labs need more than a core, and resources of the machine:
links, loop devices, a Ray cluster, shared memory that must all be freed. They run one after
the other, as with one worker. Tests that need only their own process run beside them; those that
compile parts of the simulator share a worker, where each part is compiled once.

The largest group is run first, groups of a single test last.  Tests of simulated clusters, which
take seconds each, are such groups: they fill both workers until the end of the run.
"""

from xdist.scheduler import LoadScopeScheduling

# All of a folder, and single files elsewhere that put something into shared memory, as NIXL does.
OF_THE_MACHINE = (
    "tests/contract/",
    "tests/e2e/",
    "tests/property/test_part_slices.py",
    "tests/property/test_rank_bytes.py",
    "tests/unit/test_doctor.py",
    "tests/unit/test_experiment_data_plane.py",
    "tests/unit/test_fuzz.py",
    "tests/unit/test_storage_nixl.py",
    "tests/unit/test_transport_ucx_config.py",
)

#: Files of these folders that share nothing of the machine: each test starts a server at most.
OF_THEIR_PROCESS = (
    "tests/contract/test_leadership_contract.py",
    "tests/contract/test_object_tree_contract.py",
    "tests/contract/test_scheduling_contract.py",
    "tests/e2e/test_control_reset.py",
    "tests/e2e/test_frontend_openai.py",
    "tests/e2e/test_page_pictures.py",
)

#: Files with tests that run code compiled by numba.
COMPILED = (
    "tests/parity/test_recorded_run.py",
    "tests/property/test_policy_kernels.py",
    "tests/property/test_sim_compiled_scheduler.py",
    "tests/property/test_sim_cores.py",
    "tests/unit/test_sim_core_choice.py",
    "tests/unit/test_sim_stories.py",
)

#: Files of tests that take seconds each and share nothing, such as a fixture of their module.
APART = (
    "tests/unit/test_chaos_simulation.py",
    "tests/unit/test_simulated_dram.py",
    "tests/unit/test_simulated_front_ends.py",
    "tests/unit/test_simulated_leadership.py",
    "tests/unit/test_simulated_storage.py",
    "tests/unit/test_simulated_tenants.py",
    "tests/unit/test_simulated_two_legs.py",
    "tests/unit/test_simulated_weights.py",
)


def group(test: str) -> str:
    """Return the group of a test: one worker runs all tests of a group, one after the other."""
    if test.startswith(OF_THE_MACHINE) and not test.startswith(OF_THEIR_PROCESS):
        return "the machine"
    if test.startswith(APART):
        return test
    return "compiled" if test.startswith(COMPILED) else test.split("::", 1)[0]


class OneMachine(LoadScopeScheduling):
    """Gives each group of tests to the next free worker, the largest one, the machine's, first."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)
