"""``--worker-extension-cls tests.e2e.hasty_worker.FrequentJanitor``: continuous janitors."""

from dualpath.engine import storage_keeping


class FrequentJanitor:
    """Adds nothing to a worker; naming it makes the worker import this module."""


vars(storage_keeping).update(BEAT_S=0.02)
