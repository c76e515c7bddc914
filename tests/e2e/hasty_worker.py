"""``--worker-extension-cls tests.e2e.hasty_worker.HastyKeeper``: a storage kept all the time."""

from dualpath.engine import storage_keeping


class HastyKeeper:
    """Adds nothing to a worker; that it is named makes the worker import this module."""


vars(storage_keeping).update(BEAT_S=0.02)
