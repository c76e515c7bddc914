"""Dispatch of the router's messages to the parts of an engine that execute them."""

import logging
from collections.abc import Callable

from dualpath.core.cluster import HostProcess
from dualpath.core.control import (
    ConfirmedDead,
    EngineMessage,
    LivenessProbe,
    Lookup,
    PeerDown,
    PeerUp,
    Registered,
    Retain,
    RouterMessage,
    Sync,
    Synced,
)
from dualpath.core.errors import DualPathError
from dualpath.core.request_messages import Assign, Failed, Persist, Read, Release
from dualpath.engine.assigned_requests import AssignedRequests
from dualpath.engine.lookups import Lookups
from dualpath.engine.rank import Rank
from dualpath.engine.served_prompts import ServedPrompts

log = logging.getLogger(__name__)


class RouterCommands:
    """Executes commands in the order of their arrival; called by one thread.

    ``has_exited`` returns whether a process of this machine has ended.
    """

    def __init__(
        self,
        rank: Rank,
        requests: AssignedRequests,
        prompts: ServedPrompts,
        lookups: Lookups,
        send: Callable[[EngineMessage], None],
        has_exited: Callable[[HostProcess], bool],
    ) -> None:
        self._rank = rank
        self._requests = requests
        self._prompts = prompts
        self._lookups = lookups
        self._send = send
        self._has_exited = has_exited

    def handle(self, message: RouterMessage) -> None:
        """Execute a command; answers go through ``send``.  Never raises for a bad command."""
        request_id = getattr(message, "request_id", "")
        try:
            self._dispatch(message)
        except DualPathError as error:
            log.warning("%s %s failed: %s", type(message).__name__, request_id, error)
            reason = str(error)
        except Exception as error:  # a defect in one command must not affect the others
            log.exception("%s %s failed", type(message).__name__, request_id)
            reason = repr(error)
        else:
            return
        if request_id:
            self._send(Failed(request_id=request_id, reason=reason))

    def _dispatch(self, message: RouterMessage) -> None:
        match message:
            case Registered():
                self._begin_session(message)
            case PeerUp():
                self._rank.peer_up(message.address)
            case PeerDown():
                self._rank.peers.down(message)
            case LivenessProbe():
                if self._has_exited(message.writer.process):
                    self._send(ConfirmedDead(message.writer))
            case Lookup():
                self._lookups.begin(message)
            case Sync():
                self._send(Synced(call_id=message.call_id))
            case Assign():
                self._requests.assign(message)
            case Read():
                self._requests.read(message)
            case Persist():
                self._prompts.persist(message)
            case Release():
                self._requests.ask_release(message)
            case Retain():
                self._requests.retain(message)

    def _begin_session(self, message: Registered) -> None:
        self._requests.begin_session(caching=message.enable_caching)
        self._rank.peers.only(message.peers)
        for peer in message.peers:
            self._rank.peer_up(peer)
        self._requests.send_settled()
