"""``--worker-extension-cls tests.e2e.poisoned_worker.PoisonedHbm`` for ``tests.poisoned_hbm``."""

from tests.poisoned_hbm import poison_hbm


class PoisonedHbm:
    """Adds nothing to a worker; naming it makes the worker import this module."""


poison_hbm()
