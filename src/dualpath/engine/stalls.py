"""Which agents have stalled: how long a forward pass waits for transfers before it gives them up.

A transfer that neither ends nor fails (a peer that hangs, a link that drops everything) must not
hold the engine.  Four ways to bound the wait were weighed:

* *A limit for each wait* adds up: a pass waits 4L-1 times.
* *A limit for the whole pass* is wrong for both: a prompt of 64K tokens over a slow link takes
  minutes and is well, and a link that is dead is noticed only then.
* *A limit without progress* is right for a dead link, and lets one that trickles hold the pass for
  as long as it likes: one transfer just in time, again and again.
* *A limit that progress pays back*, which is what ``Patience`` does.  A pass has ``deadline_s`` for
  each agent.  The time that it waits for transfers of the agent is taken off; a transfer that ends
  gives back what its bytes take at ``SLOWEST_BYTES_PER_S``, up to the whole again.  A dead link
  costs one deadline, a link faster than that rate is never given up, and any other costs at most
  the deadline and the time of its bytes at that rate.

What is under way lengthens the limit by its own time at that rate, as bytes that share a link may
all end late, at most ``MOST_TIMES`` deadlines in all.  Only waiting counts: not computation, not
the time in which this process stands still.

One transfer that never ends does not prove that its agent is dead.  So an agent that has stalled is
tried by a pass now and then, which waits ``TRIAL_S`` only; what ends, clears it.
"""

from collections import Counter
from collections.abc import Collection

from dualpath.engine.threads import OS_THREADS, Threads

#: A link that moves KV slower than this is as good as dead: 64K tokens of KV of 70 KB take 460 s.
SLOWEST_BYTES_PER_S = 10e6
#: Of the deadline, whatever is under way: with 30 s it stays below the router's 600 s of a request.
MOST_TIMES = 8.0


#: How long a pass waits for an agent that has stalled before, and how often one does at most: a
#: tenth of the engine's time.
TRIAL_S = 0.5
TRIAL_GAP_S = 5.0
_NS_PER_S = 1_000_000_000


class StalledAgents:
    """Agents with transfers under way that were given up, until one of their transfers ends.

    Nobody waits for them, and they get no new transfers, but for a trial now and then.
    """

    def __init__(self, threads: Threads = OS_THREADS) -> None:
        self._threads = threads
        self._lock = threads.lock()
        self._moving: Counter[str] = Counter()
        self._next_trial_ns: dict[str, int] = {}

    def __contains__(self, agent: str) -> bool:
        with self._lock:
            return agent in self._next_trial_ns

    def posted(self, agent: str) -> None:
        """A transfer with it is under way."""
        with self._lock:
            self._moving[agent] += 1

    def ended(self, agent: str) -> None:
        """One is over, well or not: the agent lives."""
        with self._lock:
            self._moving[agent] -= 1
            if not self._moving[agent]:
                del self._moving[agent]
            self._next_trial_ns.pop(agent, None)

    def add(self, agent: str) -> None:
        """A wait for it was given up; without effect if nothing is under way that could end it."""
        with self._lock:
            if agent in self._moving:
                self._next_trial_ns.setdefault(agent, 0)

    def discard(self, agent: str) -> None:
        """It has joined anew."""
        with self._lock:
            self._next_trial_ns.pop(agent, None)

    def is_shut(self, agent: str) -> bool:
        """Whether it has stalled and is not to be tried now."""
        with self._lock:
            return self._threads.now_ns() < self._next_trial_ns.get(agent, 0)

    def tried(self, agent: str) -> None:
        """A pass tries it: no other does for a while, unless it moves."""
        with self._lock:
            if agent in self._next_trial_ns:
                gap_ns = int(TRIAL_GAP_S * _NS_PER_S)
                self._next_trial_ns[agent] = self._threads.now_ns() + gap_ns


class Patience:
    """What one pass has left for each agent; used by the engine's thread and the pump."""

    def __init__(
        self, deadline_s: float, stalled: StalledAgents, threads: Threads = OS_THREADS
    ) -> None:
        self.deadline_s = deadline_s
        self.stalled = stalled
        self._lock = threads.lock()
        self._waited_s: dict[str, float] = {}
        self._moving_bytes: dict[str, int] = {}

    def posted(self, agent: str, size_bytes: int) -> None:
        """A transfer is under way."""
        self.stalled.posted(agent)
        with self._lock:
            self._moving_bytes[agent] = self._moving_bytes.get(agent, 0) + size_bytes

    def ended(self, agent: str, size_bytes: int) -> None:
        """It is over, well or not."""
        with self._lock:
            self._moving_bytes[agent] -= size_bytes
            left_s = self._waited_s.get(agent, 0.0) - size_bytes / SLOWEST_BYTES_PER_S
            self._waited_s[agent] = max(left_s, 0.0)
        self.stalled.ended(agent)

    def waited(self, agents: Collection[str], seconds: float) -> list[str]:
        """The pass has waited for these; return those for which it waits no longer."""
        with self._lock:
            for agent in agents:
                self._waited_s[agent] = self._waited_s.get(agent, 0.0) + seconds
            return [agent for agent in agents if self._waited_s[agent] >= self._limit_s(agent)]

    def _limit_s(self, agent: str) -> float:
        moving_s = self._moving_bytes.get(agent, 0) / SLOWEST_BYTES_PER_S
        deadline_s = self.deadline_s
        if agent in self.stalled:
            deadline_s = min(TRIAL_S, deadline_s)
        return min(deadline_s + moving_s, MOST_TIMES * deadline_s)
