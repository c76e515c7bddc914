"""A TCP relay between two processes of a cluster that can reset its connections."""

import asyncio
import contextlib
import socket
import struct
from typing import Self

_CHUNK_BYTES = 1 << 16
#: Closing with this linger option sends RST and drops unsent bytes, as a failing network does.
_RESET = struct.pack("ii", 1, 0)


class Relay:
    """Listens on a free loopback port and forwards to ``port``, whose server may be down."""

    def __init__(self, port: int = 0) -> None:
        self.port = port
        self._open: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        self.reset()

    def reset(self) -> int:
        """Reset every connection at both ends; return the number of connections."""
        writers = list(self._open)
        for writer in writers:
            _reset(writer)
        return len(writers) // 2

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Cancelled only when the event loop ends.
        with contextlib.suppress(asyncio.CancelledError):
            await self._forward(reader, writer)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            onward_reader, onward = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            _reset(writer)  # as a refused connection to the process itself
            return
        ends = (writer, onward)
        self._open.update(ends)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(reader, onward))
                both.create_task(_copy(onward_reader, writer))
        except* OSError:
            pass
        finally:
            self._open.difference_update(ends)
            for end in ends:
                end.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while received := await reader.read(_CHUNK_BYTES):
        writer.write(received)
        await writer.drain()
    if writer.can_write_eof() and not writer.is_closing():
        with contextlib.suppress(OSError):
            writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
