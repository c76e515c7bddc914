"""A process that serves is not held up by looks for garbage among what lives."""

import subprocess
import sys

_SERVES = """
import gc
from dualpath.router.asgi import collect_seldom

loaded = [[] for _ in range(1000)]
collect_seldom()
looks = []
gc.callbacks.append(lambda phase, info: looks.append(info["generation"]))
streams = [[[]] for _ in range(20000)]
print(max(looks), any(one is loaded for one in gc.get_objects()), gc.get_threshold()[0])
"""


def test_what_was_loaded_is_no_garbage_and_what_is_served_is_looked_at_in_small_parts() -> None:
    """40,000 new objects lead to no look at all of them."""
    run = subprocess.run([sys.executable, "-c", _SERVES], capture_output=True, check=True)
    assert run.stdout.split() == [b"1", b"False", b"1000"]
