"""One node's process of the KV bulk: Layer Blocks over NIXL at the full rate of its links.

A target has one region of HBM per source.  A source writes a known content repeatedly, one
(request, layer) per posted transfer.
"""

import select
import sys
import time

import msgspec
import numpy as np
from numpy.typing import NDArray

from dualpath.core.errors import TransportError
from dualpath.transport.contract import AgentInfo, Direction, RegionInfo, Transfer, TransferState
from dualpath.transport.memory import RegisteredMemory, allocate_registered
from dualpath.transport.nixl import NixlTransport
from dualpath_lab.experiments.node_channel import read_arguments, send_line

#: Poll interval of posted transfers; two in flight saturate every link of a lab with it.
_POLL_S = 0.002
_DRAIN_DEADLINE_S = 30.0
_BUFFER = "buffer"


class BulkArguments(msgspec.Struct, frozen=True):
    """Arguments: the agent, the ports of its lane, its blocks, the agents that write to it."""

    agent: str
    ports: str
    block_bytes: int
    blocks: int
    in_flight: int
    sources: tuple[str, ...]


class BulkTargets(msgspec.Struct, frozen=True):
    """Agents to write to until "stop"."""

    agents: tuple[AgentInfo, ...]


class BulkCount(msgspec.Struct, frozen=True):
    """Bytes that have arrived at their targets by ``at_s`` of the monotonic clock."""

    bytes: int
    at_s: float


class BulkChecked(msgspec.Struct, frozen=True):
    """Number of blocks written to this process, and of wrong ones among them."""

    blocks: int
    wrong: int


def contents(agent: str, arguments: BulkArguments) -> NDArray[np.uint8]:
    """Return the content of an agent's buffer, one row per block."""
    seed = list(agent.encode())
    shape = (arguments.blocks * arguments.in_flight, arguments.block_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


class Bulk:
    """A node's agent with its buffer, the HBM that others write to, and its posted transfers."""

    def __init__(self, arguments: BulkArguments) -> None:
        self._arguments = arguments
        # TCP only: shared memory would bypass the links.
        self.transport = NixlTransport(
            arguments.agent, tls="tcp", engine_config={"TCP_PORT_RANGE": arguments.ports}
        )
        self._buffer = self._register(_BUFFER)
        self._buffer.array[:] = contents(arguments.agent, arguments).reshape(-1)
        self._hbm = {source: self._register(source) for source in arguments.sources}
        self._posted: dict[tuple[str, int], Transfer] = {}
        self._done_bytes = 0

    def write_to(self, targets: BulkTargets) -> None:
        """Connect to the targets and post the first transfers."""
        for info in targets.agents:
            if info.agent != self._arguments.agent:
                self.transport.connect(info)
            for part in range(self._arguments.in_flight):
                self._post(info.agent, part)

    @property
    def is_writing(self) -> bool:
        """Whether transfers are posted."""
        return bool(self._posted)

    def poll(self, *, repost: bool) -> None:
        """Count the transfers that are done, and post each again if ``repost``.

        Raises ``TransportError`` if one has failed.
        """
        for (target, part), transfer in list(self._posted.items()):
            state = transfer.poll()
            if state is TransferState.MOVING:
                continue
            if state is TransferState.FAILED:
                raise TransportError(f"KV bulk to {target!r}: {transfer.error()}")
            transfer.release()
            del self._posted[target, part]
            self._done_bytes += transfer.bytes
            if repost:
                self._post(target, part)

    def count(self) -> BulkCount:
        """Return the bytes that have arrived so far."""
        return BulkCount(self._done_bytes, time.monotonic())

    def stop(self) -> None:
        """Wait for the posted transfers.

        Raises ``TransportError`` if that takes longer than half a minute.
        """
        deadline_s = time.monotonic() + _DRAIN_DEADLINE_S
        while self._posted:
            self.poll(repost=False)
            if time.monotonic() > deadline_s:
                raise TransportError(f"KV bulk still moves after {_DRAIN_DEADLINE_S:g} s")
            time.sleep(_POLL_S)

    def check(self) -> BulkChecked:
        """Compare the received blocks with the content of their sources."""
        wrong = 0
        for source, memory in self._hbm.items():
            expected = contents(source, self._arguments)
            found = memory.array.reshape(expected.shape)
            wrong += int((found != expected).any(axis=1).sum())
        return BulkChecked(len(self._hbm) * self._blocks, wrong)

    @property
    def _blocks(self) -> int:
        return self._arguments.blocks * self._arguments.in_flight

    def _register(self, name: str) -> RegisteredMemory:
        size = self._arguments.block_bytes
        memory = allocate_registered(self._blocks * size)
        self.transport.register(
            RegionInfo(name, memory.address, size, size, self._blocks), keep_alive=memory
        )
        return memory

    def _post(self, target: str, part: int) -> None:
        first = part * self._arguments.blocks
        # Even blocks first, then odd ones: NIXL would merge neighbours, and blocks of a request are
        # not neighbours in memory.
        pieces = [
            *range(first, first + self._arguments.blocks, 2),
            *range(first + 1, first + self._arguments.blocks, 2),
        ]
        self._posted[target, part] = self.transport.post(
            Direction.WRITE, _BUFFER, pieces, target, self._arguments.agent, pieces
        )


def main() -> None:
    """Run the bulk of one node; argument: ``BulkArguments`` as JSON."""
    bulk = Bulk(read_arguments(BulkArguments))
    send_line(bulk.transport.info())
    try:
        while True:
            timeout_s = _POLL_S if bulk.is_writing else None
            ready, _, _ = select.select([sys.stdin], [], [], timeout_s)
            if ready and not _execute(bulk, sys.stdin.readline().strip()):
                return
            bulk.poll(repost=True)
    finally:
        bulk.transport.close()


def _execute(bulk: Bulk, line: str) -> bool:
    """Execute one command; False at the end of the input."""
    match line:
        case "":
            return False
        case "count":
            send_line(bulk.count())
        case "stop":
            bulk.stop()
            send_line(bulk.count())
        case "check":
            send_line(bulk.check())
        case targets:
            bulk.write_to(msgspec.json.decode(targets, type=BulkTargets))
            send_line("writing")
    return True


if __name__ == "__main__":
    main()
