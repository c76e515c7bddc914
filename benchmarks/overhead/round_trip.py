"""Time to wake an idle process on this machine: a lower bound of every message's latency."""

import multiprocessing
import socket
import statistics
import time

_TRIPS = 200
#: Long enough for both processes to sleep.
_PAUSE_S = 0.01


def idle_round_trip_s() -> float:
    """Return the median round-trip time of one byte over loopback TCP between idle processes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        echo = multiprocessing.get_context("fork").Process(target=_echo, args=(listener,))
        echo.start()
        with socket.create_connection(listener.getsockname()) as connection:
            times_s = [_trip_s(connection) for _ in range(_TRIPS)]
        echo.join()
    return statistics.median(times_s)


def _trip_s(connection: socket.socket) -> float:
    time.sleep(_PAUSE_S)
    start_s = time.perf_counter()
    connection.send(b"\0")
    connection.recv(1)
    return time.perf_counter() - start_s


def _echo(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        while received := connection.recv(1):
            connection.send(received)
