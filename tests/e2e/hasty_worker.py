"""``--worker-extension-cls tests.e2e.hasty_worker.HastyKeeper``: janitors that run continuously."""

from dualpath.engine import storage_keeping


class HastyKeeper:
    """Adds nothing to a worker; naming it makes the worker import this module."""


vars(storage_keeping).update(BEAT_S=0.02)
