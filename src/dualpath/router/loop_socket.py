"""A ZMQ socket in an event loop that takes all there is whenever something has come.

``zmq.asyncio`` makes a future for each frame in either direction and asks libzmq for its state
several times more: half of what a scheduler spent on a message.  Here a message that is there is
taken at once, and sending waits for nothing.  The loop is woken by libzmq's file descriptor, which
tells of a change once: it is waited for only after a receive has found nothing, and after a send,
which may have swallowed the news, one more receive is tried.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

import zmq

T = TypeVar("T")

#: As numbers: joining pyzmq's flags takes longer than libzmq does to take a frame.
AT_ONCE, _AND_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
#: So many messages are taken before others of the loop have their turn.
_IN_A_ROW = 64


class LoopSocket:
    """One reader of ``socket``, which must not be closed before ``close``; senders as many as like.

    ``send`` raises ``zmq.ZMQError`` as ``zmq.Socket`` does.
    """

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._taken = 0
        self._file = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._file, self._changed.set)

    async def receive(self, take: Callable[[], T]) -> T:
        """Return what ``take`` does, once it raises ``zmq.Again`` no more."""
        self._taken += 1
        if self._taken > _IN_A_ROW:
            self._taken = 0
            await asyncio.sleep(0)
        while True:
            try:
                return take()
            except zmq.Again:
                self._taken = 0
                self._changed.clear()
                await self._changed.wait()

    def send(self, frames: Sequence[bytes]) -> None:
        """Hand a message to libzmq; raises ``zmq.Again`` if it takes none at present."""
        try:
            *first, last = frames
            for frame in first:
                self._socket.send(frame, _AND_MORE)
            self._socket.send(last, AT_ONCE)
        finally:
            self._changed.set()

    def close(self) -> None:
        """Listen to the descriptor no more."""
        self._loop.remove_reader(self._file)
