"""A process that executors start in tests: it prints its arguments and exits on request."""

import os
import signal
import subprocess
import sys
from typing import NoReturn

ENTRY = "tests.launched:main"


def main() -> NoReturn:
    """Print the arguments; exit with a code, or on a signal."""
    what, *words = sys.argv[1:]
    if what == "end":
        print("its reason", flush=True)
        sys.exit(int(words[0]))
    signal.signal(signal.SIGTERM, _asked)
    # Tests that a shell runs in the background are started with SIGINT ignored, and so is this.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    given = [f"{name}={value}" for name, value in os.environ.items() if name.startswith("GIVEN")]
    child = subprocess.Popen(["sleep", "1000"]).pid if what == "parent" else 0
    print("up", os.getpid(), child, *words, *given, flush=True)
    while True:
        signal.pause()


def _asked(number: int, frame: object) -> NoReturn:
    print("asked", flush=True)
    sys.exit(0)


if __name__ == "__main__":
    main()
