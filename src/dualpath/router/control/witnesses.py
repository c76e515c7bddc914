"""Who can tell that a process has ended: the machine it ran on, by the router or an engine there.

Slots in quarantine wait for the end of a prefill engine's process, or for its own word.  A process
that falls silent gives neither: it may be stopped and write when it goes on.  Nor is time a proof.
Where nobody is left on its machine, the quarantine lasts until an engine comes up there, or the
prefill engine itself comes back under its ``engine_id``.
"""

from collections.abc import Callable, Iterable

from dualpath.core.cluster import HostProcess, Writer
from dualpath.core.control import LivenessProbe, RouterMessage
from dualpath.node.host_process import has_exited
from dualpath.router.control.registry import Registry


class Witnesses:
    """Asks about processes; ``send`` reaches an engine, which answers ``ConfirmedDead`` or nothing.

    ``has_exited`` is the word of the router's own machine.
    """

    def __init__(
        self,
        registry: Registry,
        send: Callable[[str, RouterMessage], None],
        has_exited: Callable[[HostProcess], bool] = has_exited,
    ) -> None:
        self._registry = registry
        self._send = send
        self._has_exited = has_exited

    def ask(self, writers: Iterable[Writer]) -> list[Writer]:
        """Return those that this machine knows to be gone; ask engines about the others."""
        gone = []
        for writer in writers:
            if self._has_exited(writer.process):
                gone.append(writer)
            elif (witness := self._neighbour(writer)) is not None:
                self._send(witness, LivenessProbe(writer))
        return gone

    def _neighbour(self, writer: Writer) -> str | None:
        host = writer.process.host
        return next(
            (e.engine_id for e in self._registry.alive() if host and e.writer.process.host == host),
            None,
        )
