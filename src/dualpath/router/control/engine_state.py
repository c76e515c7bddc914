"""What the router knows of one engine: its process, its session, its last report."""

from collections import deque
from enum import StrEnum

from dualpath.core.cluster import Writer
from dualpath.core.control import EngineMessage, Report, RouterMessage
from dualpath.core.sessions import ROUTER_TABLE, Channel, RouterSideState, StateMachine
from dualpath.router.engines import EngineInfo

#: So many former processes of an engine are remembered; an older one that still runs would be
#: taken for a new one, and the one in its place for dead.
_EPOCHS_KEPT = 1024


class Pause(StrEnum):
    """Why an engine that lives gets nothing new."""

    DRAINING = "draining"
    ASKED = "asked"
    SUSPECT = "suspect"


class EngineState:
    """An engine that has greeted: its info, its session and its last report.

    ``left`` if it went with a goodbye, its own or that of its drained group; ``pauses`` say why it
    gets nothing new, if so; ``drained`` if it has been told that nothing is left on its group.
    """

    def __init__(self, info: EngineInfo) -> None:
        self.info = info
        self.identity = b""
        self.talk: Channel[RouterMessage, EngineMessage] = Channel("")
        self.machine = StateMachine(ROUTER_TABLE, RouterSideState.UNKNOWN)
        self.registration = 0
        self.heard_s = self.spoken_s = float("-inf")
        self.left = self.drained = False
        self.group_left_s = float("-inf")
        self.former_epochs: deque[str] = deque(maxlen=_EPOCHS_KEPT)
        #: Former processes on the machine of their successor that nobody has seen end.
        self.unproven: dict[str, Writer] = {}
        self.report: Report | None = None
        self.pauses: set[Pause] = set()
        self._former_totals: dict[str, float] = {}

    @property
    def alive(self) -> bool:
        """Whether it has a session and takes part."""
        return self.machine.state is RouterSideState.LIVE

    @property
    def talks(self) -> bool:
        """Whether it has a session, be it only to leave with its group."""
        return self.machine.state in (RouterSideState.LIVE, RouterSideState.LEAVING)

    @property
    def here(self) -> bool:
        """Whether it has a session, or waits for one with its group."""
        return self.talks or self.machine.state is RouterSideState.REGISTERING

    def open(self, session: str, identity: bytes, now_s: float) -> None:
        """Begin a session."""
        self.talk = Channel(session)
        self.identity, self.heard_s = identity, now_s
        self.left = self.drained = False
        self.pauses &= {Pause.ASKED}

    def greeted(self, identity: bytes, now_s: float) -> None:
        """It greets on a connection; while it waits for its group this is its sign of life."""
        self.identity = identity
        if not self.talks:
            # What it says of a former session, or a former process of its, is over.
            self.talk, self.heard_s = Channel(""), now_s

    def leaves_with_group(self, now_s: float) -> None:
        """A rank of its drained group has said goodbye; it is to do so as well."""
        self.left, self.group_left_s = True, now_s

    def totals(self) -> dict[str, float]:
        """Return the engine's counters, monotonic over its restarts."""
        totals = dict(self._former_totals)
        for name, value in (self.report.counters if self.report else {}).items():
            totals[name] = totals.get(name, 0) + value
        return totals

    def forgets(self, writer: Writer) -> bool:
        """A former process is gone; whether that was not known."""
        return self.unproven.pop(writer.epoch, None) is not None

    def restart(self, info: EngineInfo) -> None:
        """Take over another process's info; what the former one counted is kept.

        A new process speaks for the end of the one before, unless both are on one machine, which
        can be asked.  One that was here before, and had been replaced, speaks for nobody.
        """
        dead = self.machine.state is RouterSideState.DEAD
        returns = info.epoch in self.former_epochs
        if not dead and (returns or same_machine(self.info.writer, info.writer)):
            self.unproven[self.info.epoch] = self.info.writer
        if returns:
            self.former_epochs.remove(info.epoch)
            self.unproven.pop(info.epoch, None)
        self._former_totals = self.totals()
        self.report = None
        self.pauses.clear()
        self.former_epochs.append(self.info.epoch)
        if len(self.unproven) > _EPOCHS_KEPT:
            # Nor is one that is forgotten of the two taken for dead, as it is on the same machine.
            known = set(self.former_epochs)
            self.unproven = {e: w for e, w in self.unproven.items() if e in known}
        self.info = info


def same_machine(one: Writer, other: Writer) -> bool:
    """Whether two processes are known to be on one machine."""
    return bool(one.process.host) and one.process.host == other.process.host
