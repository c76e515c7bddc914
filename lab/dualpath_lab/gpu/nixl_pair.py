"""Two processes that move pieces through dualpath's NIXL transport; a line of JSON per transfer.

`python -m dualpath_lab.gpu.nixl_pair cpu|cuda PIECES`; such lines begin with `@`.
"""

import json
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from dualpath.transport.contract import Direction, RegionInfo, TransferState
from dualpath.transport.memory import allocate_registered
from dualpath.transport.nixl import NixlTransport

PIECE_BYTES = 262144
_REPEATS = 4
_TRANSFER_S = 8.0
_REQUEST_S = 30.0
HERE, THERE = "here", "there"


class Agent:
    """A transport with a region of each kind of memory, filled by a single value."""

    def __init__(self, name: str, device: str, pieces: int) -> None:
        self._cuda = device == "cuda"
        if self._cuda:
            torch.cuda.set_device(0)
        self.transport = NixlTransport(name)
        self.tensors: dict[str, Any] = {}
        for kind in ("DRAM", "VRAM") if self._cuda else ("DRAM",):
            self._register(kind, pieces)

    def _register(self, kind: str, pieces: int) -> None:
        size_bytes = pieces * PIECE_BYTES
        owner: object
        if kind == "VRAM":
            tensor = owner = torch.zeros(size_bytes, dtype=torch.uint8, device="cuda")
        else:
            memory = allocate_registered(size_bytes)
            memory.touch()
            tensor, owner = torch.from_numpy(memory.array), memory
            if self._cuda:
                status = torch.cuda.cudart().cudaHostRegister(memory.address, size_bytes, 1)
                if status.value:
                    raise RuntimeError(f"{size_bytes} bytes cannot be pinned: {status}")
        region = RegionInfo(kind, tensor.data_ptr(), PIECE_BYTES, PIECE_BYTES, pieces, memory=kind)
        self.transport.register(region, owner)
        self.tensors[kind] = tensor

    def fill(self, kind: str, value: int) -> None:
        """Set all bytes of a region."""
        self.tensors[kind].fill_(value)
        self._synchronize()

    def values(self, kind: str) -> tuple[int, int]:
        """Return the smallest and the largest byte of a region."""
        self._synchronize()
        return int(self.tensors[kind].min()), int(self.tensors[kind].max())

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def serve_other(pipe: Connection, device: str, pieces: int) -> None:
    """Fill and read regions as the first process requests, until it sends None."""
    agent = Agent(THERE, device, pieces)
    pipe.send(agent.transport.info())
    while (request := pipe.recv()) is not None:
        kind, value = request
        if value is None:
            pipe.send(agent.values(kind))
        else:
            agent.fill(kind, value)
            pipe.send(None)
    os._exit(0)


class Pair:
    """The first process with its agent, and the pipe to the second."""

    def __init__(self, agent: Agent, pipe: Connection, pieces: int) -> None:
        self._agent, self._pipe, self._pieces = agent, pipe, pieces
        self._value = 0

    def run(self) -> None:
        """Move between every two kinds of memory, of the other process and of this one."""
        kinds = list(self._agent.tensors)
        for peer in (THERE, HERE):
            for mine in kinds:
                for theirs in kinds:
                    for direction in (Direction.WRITE, Direction.READ):
                        if peer == THERE or mine != theirs:
                            self._report(peer, mine, theirs, direction)

    def _report(self, peer: str, mine: str, theirs: str, direction: Direction) -> None:
        row: dict[str, Any] = {
            "from": mine if direction is Direction.WRITE else theirs,
            "to": theirs if direction is Direction.WRITE else mine,
            "by": direction.value,
            "process": "other" if peer == THERE else "same",
        }
        try:
            row |= self._move(peer, mine, theirs, direction)
        except Exception as error:  # NIXL raises errors without a common base class.
            row["error"] = repr(error)[:300]
        print("@" + json.dumps(row), flush=True)

    def _move(self, peer: str, mine: str, theirs: str, direction: Direction) -> dict[str, Any]:
        write = direction is Direction.WRITE
        self._value = self._value % 250 + 1
        self._agent.fill(mine, self._value if write else 0)
        self._ask(peer, theirs, 0 if write else self._value)
        order = np.random.default_rng(0).permutation(self._pieces).astype(np.int64)
        straight = np.arange(self._pieces, dtype=np.int64)
        times_s, posts_s = [], []
        for _ in range(_REPEATS):
            started_s = time.perf_counter()
            transfer = self._agent.transport.post(direction, mine, straight, peer, theirs, order)
            posts_s.append(time.perf_counter() - started_s)
            while (state := transfer.poll()) is TransferState.MOVING:
                if time.perf_counter() - started_s > _TRANSFER_S:
                    raise TimeoutError(f"the transfer has not ended within {_TRANSFER_S:g} s")
                time.sleep(0)
            times_s.append(time.perf_counter() - started_s)
            if state is not TransferState.DONE:
                raise RuntimeError(f"the transfer failed: {transfer.error()}")
            transfer.release()
        seen = self._ask(peer, theirs, None) if write else self._agent.values(mine)
        return {
            "right": seen == (self._value, self._value),
            "GB_per_s": self._pieces * PIECE_BYTES / min(times_s) / 1e9,
            "first_ms": 1e3 * times_s[0],
            "post_ms": 1e3 * min(posts_s),
        }

    def _ask(self, peer: str, kind: str, value: int | None) -> tuple[int, int] | None:
        """Fill a region of a peer, or with None return its values."""
        if peer == HERE:
            if value is None:
                return self._agent.values(kind)
            self._agent.fill(kind, value)
            return None
        self._pipe.send((kind, value))
        if not self._pipe.poll(_REQUEST_S):
            raise TimeoutError(f"the other process has not answered within {_REQUEST_S:g} s")
        found: tuple[int, int] | None = self._pipe.recv()
        return found


def main(device: str, pieces: int) -> None:
    """Start the second process and run all transfers."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    other = context.Process(target=serve_other, args=(there, device, pieces), daemon=True)
    other.start()
    agent = Agent(HERE, device, pieces)
    if not here.poll(_REQUEST_S):
        raise TimeoutError(f"the other process has not started within {_REQUEST_S:g} s")
    agent.transport.connect(here.recv())
    try:
        Pair(agent, here, pieces).run()
    finally:
        here.send(None)
        other.join(_TRANSFER_S)
        other.kill()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # NIXL's threads may still run.
