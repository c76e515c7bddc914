"""``--worker-extension-cls tests.e2e.careless_worker.CarelessHbm``: poisoned, one wait skipped."""

from tests.poisoned_hbm import forget_a_wait, poison_hbm


class CarelessHbm:
    """Adds nothing to a worker; naming it makes the worker import this module."""


poison_hbm()
# With one region or two, a layer that follows another one in its region.
forget_a_wait(2)
