"""``--worker-extension-cls tests.e2e.unwaited_worker.UnwaitedHbm``: poisoned, one wait skipped."""

from tests.poisoned_hbm import poison_hbm, skip_wait


class UnwaitedHbm:
    """Adds nothing to a worker; naming it makes the worker import this module."""


poison_hbm()
# With one region or two, a layer that follows another one in its region.
skip_wait(2)
