"""A cache directory of the tests' own, so that measurements of test engines do not reach users."""

import contextlib
import os
from pathlib import Path

from dualpath.node.cache_directory import cache_directory
from dualpath_lab.models.prepared import read_stamp

_NAME = "tests"


def use_own_cache() -> Path:
    """Let this process and its children keep models and measurements below the user's cache.

    Models that the user has are linked, those made for tests stay for the next run.  Costs that an
    earlier run measured are removed: each run is as on a machine that has none.
    """
    users = cache_directory()
    if users.name == _NAME:
        return users
    own = users / _NAME
    own.mkdir(parents=True, exist_ok=True)
    for model in users.iterdir():
        if read_stamp(model) is not None:
            with contextlib.suppress(FileExistsError):
                (own / model.name).symlink_to(model)
    for costs in own.glob("costs-*"):
        costs.unlink(missing_ok=True)
    os.environ["DUALPATH_CACHE"] = str(own)
    return own
