"""Waits on a lab's head node, from which all nodes can be reached: every URL must answer 200.

python -m benchmarks.peers.wait_until_ready TIMEOUT_S URL …
"""

import sys
import time
import urllib.error
import urllib.request

_POLL_S = 0.2
_ANSWER_S = 5.0


def answers(url: str) -> bool:
    """Tell whether a URL answers 200."""
    try:
        with urllib.request.urlopen(url, timeout=_ANSWER_S) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def main() -> None:
    """Wait for all; exit with the URLs that never answered."""
    end_s = time.monotonic() + float(sys.argv[1])
    waiting = sys.argv[2:]
    while waiting:
        waiting = [url for url in waiting if not answers(url)]
        if waiting and time.monotonic() > end_s:
            sys.exit(f"no answer from {', '.join(waiting)}")
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
