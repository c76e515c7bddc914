"""One node's process of an all-to-all: periodic messages to every peer and back.

The ping-pong stands for dispatch and combine of expert parallelism.  A round begins at its
scheduled time or at the end of the previous one, whichever is later, as layers follow each other.
One thread serves all sockets and sleeps while none is ready.
"""

import gc
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence

import msgspec

from dualpath_lab.experiments.node_channel import read_arguments, send_line

#: Bytes of the whole message, number of the round; the number is also the message's trailer.
_HEADER = struct.Struct("<II")
_TRAILER = struct.Struct("<I")
_CONNECT_DEADLINE_S = 10.0
_STDIN = 0


class ExchangeArguments(msgspec.Struct, frozen=True):
    """Arguments: listening address and port, peers, TCP congestion control."""

    address: str
    port: int
    peers: tuple[str, ...]
    max_bytes: int
    congestion_control: str


class ExchangeOrder(msgspec.Struct, frozen=True):
    """Rounds to run: ``warm_up``, which are not reported, then ``rounds``.

    The first begins at ``start_s`` of the monotonic clock.  They end after the last round, or at
    the time when it would have ended without late rounds; at least one is reported.
    """

    message_bytes: int
    period_s: float
    rounds: int
    warm_up: int
    start_s: float


class ExchangeResult(msgspec.Struct, frozen=True):
    """Duration of each round; ``late`` rounds ended after the next was due.

    ``wrong`` counts messages that came back different.
    """

    round_s: tuple[float, ...]
    late: int
    wrong: int


class Channel:
    """One connection, which sends and receives complete messages, one at a time."""

    def __init__(self, connection: socket.socket, max_bytes: int) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self._buffer = memoryview(bytearray(max_bytes))
        self._received = 0
        self._pending = memoryview(b"")

    @property
    def is_sending(self) -> bool:
        """Whether a part of a message waits for room in the socket."""
        return bool(self._pending)

    def send(self, message: memoryview) -> None:
        """Send a message; ``flush`` sends the part that the socket does not accept at once."""
        self._pending = message
        self.flush()

    def flush(self) -> None:
        """Send more of the message."""
        while self._pending:
            try:
                sent = self.socket.send(self._pending)
            except BlockingIOError:
                return
            self._pending = self._pending[sent:]

    def receive(self) -> memoryview | None:
        """Return the message if it is complete; it is valid until the next call.

        Raises ``ConnectionError`` if the peer has closed the connection.
        """
        while True:
            end = _HEADER.size
            if self._received >= end:
                end = _HEADER.unpack_from(self._buffer)[0]
            if self._received == end:
                self._received = 0
                return self._buffer[:end]
            try:
                count = self.socket.recv_into(self._buffer[self._received : end])
            except BlockingIOError:
                return None
            if not count:
                raise ConnectionError("the peer has closed its connection")
            self._received += count


class Rounds:
    """The rounds of one order, with their beginnings and durations."""

    def __init__(self, order: ExchangeOrder) -> None:
        self.number = 0
        self._order = order
        self._message = bytearray(order.message_bytes)
        self._begun_s = 0.0
        self._awaited = 0
        self._round_s: list[float] = []
        self._late = 0
        self._wrong = 0

    def seconds_left(self, now_s: float) -> float | None:
        """Return the time until the next round begins, None during a round."""
        if self._awaited:
            return None
        return max(0.0, self._due_s - now_s)

    def begin(self, channels: Sequence[Channel], now_s: float) -> None:
        """Send this round's message to every peer."""
        size_bytes = len(self._message)
        _HEADER.pack_into(self._message, 0, size_bytes, self.number)
        _TRAILER.pack_into(self._message, size_bytes - _TRAILER.size, self.number)
        self._begun_s = now_s
        self._awaited = len(channels)
        for channel in channels:
            channel.send(memoryview(self._message))

    def take(self, answer: memoryview, now_s: float) -> None:
        """Process a peer's answer; the last one ends the round."""
        header, trailer = answer[: _HEADER.size], answer[-_TRAILER.size :]
        whole = self._message.startswith(header) and self._message.endswith(trailer)
        self._wrong += not whole
        self._awaited -= 1
        if self._awaited:
            return
        counts = self.number >= self._order.warm_up
        self.number += 1
        if counts:
            self._round_s.append(now_s - self._begun_s)
            self._late += now_s > self._due_s

    def result(self, now_s: float) -> ExchangeResult | None:
        """Return the result after the last round or its time-out, else None."""
        rounds = self._order.warm_up + self._order.rounds
        end_s = self._order.start_s + rounds * self._order.period_s
        if self._awaited or not self._round_s or (self.number < rounds and now_s < end_s):
            return None
        return ExchangeResult(tuple(self._round_s), self._late, self._wrong)

    @property
    def _due_s(self) -> float:
        return self._order.start_s + self.number * self._order.period_s


class Exchange:
    """A node: answers every peer at any time, and runs the rounds of its orders."""

    def __init__(self, arguments: ExchangeArguments) -> None:
        self._arguments = arguments
        self._listener = socket.create_server((arguments.address, arguments.port))
        self._listener.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_CONGESTION, arguments.congestion_control.encode()
        )
        self._own: list[Channel] = []
        self._served: list[Channel] = []
        self._rounds: Rounds | None = None

    def connect(self) -> None:
        """Connect to every peer; all of them must be listening."""
        for peer in self._arguments.peers:
            connection = socket.socket()
            connection.setsockopt(
                socket.IPPROTO_TCP,
                socket.TCP_CONGESTION,
                self._arguments.congestion_control.encode(),
            )
            connection.settimeout(_CONNECT_DEADLINE_S)
            connection.connect((peer, self._arguments.port))
            self._own.append(Channel(connection, self._arguments.max_bytes))

    def serve(self) -> None:
        """Execute orders from standard input until its end.

        Raises ``ConnectionError`` if a peer closes its connection during a round.
        """
        while True:
            ready, writable, _ = select.select(*self._interest(), [], self._timeout_s())
            if _STDIN in ready and not self._take_order():
                return
            if self._listener in ready:
                connection, _ = self._listener.accept()
                self._served.append(Channel(connection, self._arguments.max_bytes))
            for channel in (*self._own, *self._served):
                if channel.socket in writable:
                    channel.flush()
            for channel in [channel for channel in self._served if channel.socket in ready]:
                self._answer(channel)
            self._advance([channel for channel in self._own if channel.socket in ready])

    def _interest(self) -> tuple[list[socket.socket | int], list[socket.socket]]:
        # Between orders peers send nothing.
        awaiting = self._own if self._rounds is not None else []
        readable = [channel.socket for channel in (*awaiting, *self._served)]
        writable = [c.socket for c in (*self._own, *self._served) if c.is_sending]
        return [_STDIN, self._listener, *readable], writable

    def _timeout_s(self) -> float | None:
        return None if self._rounds is None else self._rounds.seconds_left(time.monotonic())

    def _take_order(self) -> bool:
        line = os.read(_STDIN, 1 << 16)
        if line:
            self._rounds = Rounds(msgspec.json.decode(line, type=ExchangeOrder))
        return bool(line)

    def _answer(self, channel: Channel) -> None:
        """Send a message back, unless the peer has closed the connection."""
        try:
            message = channel.receive()
        except ConnectionError:
            self._served.remove(channel)
            channel.socket.close()
            return
        if message is not None:
            channel.send(message)

    def _advance(self, answered: Sequence[Channel]) -> None:
        if self._rounds is None:
            return
        for channel in answered:
            if (answer := channel.receive()) is not None:
                self._rounds.take(answer, time.monotonic())
        now_s = time.monotonic()
        if (result := self._rounds.result(now_s)) is not None:
            self._rounds = None
            send_line(result)
        elif self._rounds.seconds_left(now_s) == 0.0:
            self._rounds.begin(self._own, now_s)


def set_realtime_priority() -> bool:
    """Give this process real-time priority; False if that is not allowed.

    On hardware, model communication needs no CPU.  Here the CPUs copy the bulk, and an exchange
    would wait for a CPU longer than for any segment on the link.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        return False
    return True


def main() -> None:
    """Run the exchange of one node; argument: ``ExchangeArguments`` as JSON."""
    arguments = read_arguments(ExchangeArguments)
    exchange = Exchange(arguments)
    send_line("listening")
    sys.stdin.readline()
    exchange.connect()
    # No code here creates reference cycles; garbage collection would only delay messages.
    gc.disable()
    send_line(set_realtime_priority())
    exchange.serve()


if __name__ == "__main__":
    main()
