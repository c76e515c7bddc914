"""Which tests may run at the same time on the two workers of `make test`.

Tests that start engines, routers and labs need more than a core, and resources of the machine:
links, loop devices, a Ray cluster, shared memory that must all be freed. They run one after
the other, as with one worker. Tests that need only their own process run beside them.
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


def group(test: str) -> str:
    """Return what one worker runs, one after the other: the machine's tests, or those of a file."""
    return "the machine" if test.startswith(OF_THE_MACHINE) else test.split("::", 1)[0]


class OneMachine(LoadScopeScheduling):
    """Gives each group of tests to the next free worker, the largest one, the machine's, first."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)
