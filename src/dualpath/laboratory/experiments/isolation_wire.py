"""What the processes of the isolation experiment are told and tell: a JSON document per line."""

import os
import signal
import sys
from typing import TypeVar

import msgspec

from dualpath.ops.launch.process import die_with_parent
from dualpath.transport.contract import AgentInfo

_Message = TypeVar("_Message")


class ExchangeArguments(msgspec.Struct, frozen=True):
    """An exchange process: where it listens, with whom it exchanges, by which TCP."""

    address: str
    port: int
    peers: tuple[str, ...]
    most_bytes: int
    congestion_control: str


class ExchangeOrder(msgspec.Struct, frozen=True):
    """Rounds to do: ``warm_up``, which are not told of, then ``rounds``.

    The first begins at ``start_s`` of the monotonic clock.  They end with the last, or when all
    would be over had none begun late; one at least is told of.
    """

    message_bytes: int
    period_s: float
    rounds: int
    warm_up: int
    start_s: float


class ExchangeResult(msgspec.Struct, frozen=True):
    """Duration of each round, and how many ended when the next was due already.

    ``wrong`` messages came back other than they were sent.
    """

    round_s: tuple[float, ...]
    late: int
    wrong: int


class BulkArguments(msgspec.Struct, frozen=True):
    """A bulk process: its agent, the ports of its lane, its blocks, which agents write to it."""

    agent: str
    ports: str
    block_bytes: int
    blocks: int
    in_flight: int
    sources: tuple[str, ...]


class BulkTargets(msgspec.Struct, frozen=True):
    """Agents to write to from now on, until "stop"."""

    agents: tuple[AgentInfo, ...]


class BulkCount(msgspec.Struct, frozen=True):
    """Bytes that have arrived at their targets so far, and when that was, monotonic clock."""

    bytes: int
    at_s: float


class BulkChecked(msgspec.Struct, frozen=True):
    """Blocks that others have written to this process, and how many of them are wrong."""

    blocks: int
    wrong: int


def begin(arguments: type[_Message]) -> _Message:
    """Return the arguments of this process, which from here on dies with its parent."""
    die_with_parent(signal.SIGKILL)
    if os.getppid() == 1:
        sys.exit("the process that started this one is gone")
    return msgspec.json.decode(sys.argv[1], type=arguments)


def tell(message: object) -> None:
    """Write one line to the parent."""
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()
