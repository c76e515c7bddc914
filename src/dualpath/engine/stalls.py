"""Stalled agents, and the time that a forward pass waits for transfers before it abandons them.

A transfer that neither ends nor fails (a peer that hangs, a link that drops all packets) must not
block the engine.  Four ways to limit the wait were considered:

* *A limit for each wait* adds up, as a pass waits 4L-1 times.
* *A limit for the whole pass* cannot be chosen well: a prompt of 64K tokens over a slow but working
  link takes minutes, and a dead link would be noticed only after that time.
* *A limit without progress* suits a dead link, but a very slow link could block the pass forever
  with one transfer after the other just in time.
* *A budget that progress refills*, which is ``WaitBudget``.  A pass has ``deadline_s`` for each
  agent.  Waiting for transfers of the agent uses it up; a transfer that ends refills it by the time
  of its bytes at ``SLOWEST_BYTES_PER_S``, up to the initial budget.  A dead link costs one
  deadline, a link faster than that rate is never abandoned, and any other link costs at most the
  deadline and the time of its bytes at that rate.

Bytes under way extend the limit by their time at that rate, as all bytes that share a link may end
late, to at most ``MAX_DEADLINES`` deadlines in total.  Only waiting counts, neither computation nor
the time in which this process is suspended.

A transfer that never ends does not prove that its agent is dead.  So passes try an agent that has
stalled from time to time, and wait only ``TRIAL_S``; any transfer that ends clears the agent.
"""

from collections import Counter
from collections.abc import Collection

from dualpath.engine.threads import OS_THREADS, Threads

#: A link slower than this is useless: 64K tokens of KV of 70 KB take 460 s.
SLOWEST_BYTES_PER_S = 10e6
#: Maximum wait in deadlines, whatever is under way: with 30 s it stays below the router's limit of
#: 600 s for a request.
MAX_DEADLINES = 8.0


#: How long a pass waits for an agent that has stalled before, and the interval between such trials:
#: a tenth of the engine's time.
TRIAL_S = 0.5
TRIAL_GAP_S = 5.0
_NS_PER_S = 1_000_000_000


class StalledAgents:
    """Agents with abandoned transfers under way, until one of their transfers ends.

    Passes do not wait for them and start no new transfers with them, except for occasional trials.
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
        """A transfer with the agent is under way."""
        with self._lock:
            self._moving[agent] += 1

    def ended(self, agent: str) -> None:
        """A transfer has ended or failed: the agent responds."""
        with self._lock:
            self._moving[agent] -= 1
            if not self._moving[agent]:
                del self._moving[agent]
            self._next_trial_ns.pop(agent, None)

    def add(self, agent: str) -> None:
        """A wait for the agent was abandoned; no effect without a transfer that could clear it."""
        with self._lock:
            if agent in self._moving:
                self._next_trial_ns.setdefault(agent, 0)

    def discard(self, agent: str) -> None:
        """The agent has joined again: clear it."""
        with self._lock:
            self._next_trial_ns.pop(agent, None)

    def is_avoided(self, agent: str) -> bool:
        """Whether the agent has stalled and no trial is due."""
        with self._lock:
            return self._threads.now_ns() < self._next_trial_ns.get(agent, 0)

    def tried(self, agent: str) -> None:
        """A pass tries the agent: the next trial is due after ``TRIAL_GAP_S``."""
        with self._lock:
            if agent in self._next_trial_ns:
                gap_ns = int(TRIAL_GAP_S * _NS_PER_S)
                self._next_trial_ns[agent] = self._threads.now_ns() + gap_ns


class WaitBudget:
    """The remaining wait of one pass for each agent; used by the engine's thread and the pump."""

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
        """A transfer has ended or failed."""
        with self._lock:
            self._moving_bytes[agent] -= size_bytes
            left_s = self._waited_s.get(agent, 0.0) - size_bytes / SLOWEST_BYTES_PER_S
            self._waited_s[agent] = max(left_s, 0.0)
        self.stalled.ended(agent)

    def waited(self, agents: Collection[str], seconds: float) -> list[str]:
        """Charge a wait to agents; return those for which the budget is used up."""
        with self._lock:
            for agent in agents:
                self._waited_s[agent] = self._waited_s.get(agent, 0.0) + seconds
            return [agent for agent in agents if self._waited_s[agent] >= self._limit_s(agent)]

    def _limit_s(self, agent: str) -> float:
        moving_s = self._moving_bytes.get(agent, 0) / SLOWEST_BYTES_PER_S
        deadline_s = self.deadline_s
        if agent in self.stalled:
            deadline_s = min(TRIAL_S, deadline_s)
        return min(deadline_s + moving_s, MAX_DEADLINES * deadline_s)
