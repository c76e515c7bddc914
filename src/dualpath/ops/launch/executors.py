"""Opens the executor that settings name."""

from dualpath.ops.launch.executor import Executor
from dualpath.ops.launch.local_executor import LocalExecutor
from dualpath.ops.launch.settings import LocalClusterSettings


def open_executor(settings: LocalClusterSettings) -> Executor:
    """Return the executor; raises ``ModuleNotFoundError`` if it needs Ray and Ray is missing."""
    if settings.executor == "ray":
        from dualpath.ops.launch.ray_executor import RayExecutor

        return RayExecutor(settings)
    return LocalExecutor(settings)
