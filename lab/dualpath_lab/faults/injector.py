"""Fault injection: signals, connection resets, a failing disk, corrupted blocks."""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from dualpath.core.blocks import BlockKey, block_keys
from dualpath.core.cluster import Role
from dualpath.launch.process import all_processes
from dualpath.storage.posix import object_name
from dualpath_lab.faults.cluster import ChaosCluster, Direction
from dualpath_lab.faults.failpoint_channel import DiskFault, FailpointServer, PausedProcess
from dualpath_lab.faults.failpoints import EngineKind
from dualpath_lab.faults.load import Load
from dualpath_lab.faults.matrix import CORRUPTIONS, Component, Fault, PlannedFault

# -------------------------------------------------------------------------------------- corruption
# Damage to stored blocks at rest, as by bit rot, a torn write or swapped files.

_MOST_BITS = 8


def block_files(storage: Path, keys: Sequence[BlockKey]) -> list[Path]:
    """Return the files of the given blocks that are stored, in any namespace."""
    folders = [path for path in storage.iterdir() if path.is_dir()]
    paths = (storage / object_name(folder.name, key) for key in keys for folder in folders)
    return [path for path in paths if path.is_file()]


def corrupt(files: Sequence[Path], fault: Fault, chance: random.Random) -> int:
    """Damage files unless an engine removes or rewrites them first; return how many."""
    done = 0
    for group in _groups(files, 2 if fault is Fault.SWAPPED else 1):
        try:
            match fault:
                case Fault.BIT_FLIPS:
                    _flip_bits(group[0], chance)
                case Fault.TRUNCATED:
                    os.truncate(group[0], chance.randrange(group[0].stat().st_size))
                case Fault.NO_FILE:
                    _replace(group[0], chance)
                case _:
                    _swap(*group)
        except OSError:  # removed or rewritten meanwhile
            continue
        done += len(group)
    return done


def _groups(files: Sequence[Path], size: int) -> Iterator[tuple[Path, ...]]:
    return zip(*[iter(files)] * size, strict=False)


def _flip_bits(path: Path, chance: random.Random) -> None:
    with path.open("r+b") as file:
        size = path.stat().st_size
        for _ in range(chance.randint(1, _MOST_BITS)):
            place = chance.randrange(size)
            file.seek(place)
            byte = file.read(1)
            if byte:
                file.seek(place)
                file.write(bytes([byte[0] ^ 1 << chance.randrange(8)]))


def _replace(path: Path, chance: random.Random) -> None:
    """Replace a block's file by a directory, or by a FIFO, which blocks the process opening it."""
    path.unlink()
    chance.choice((os.mkdir, os.mkfifo))(path)


def _swap(one: Path, other: Path) -> None:
    aside = one.with_suffix(".aside")
    os.rename(one, aside)
    os.rename(other, one)
    os.rename(aside, other)


_REACH_S = 6.0
_END_S = 45.0
_BACK_S = 60.0
_SLOW_CALL_S = 0.05
_IO_ERROR_SHARE = 0.5
#: Corrupted of the stored blocks of some agents: at least this many, or this share.
_BLOCKS_HIT = 12
_BLOCKS_SHARE = 0.02
_CONTEXTS_HIT = 4


class InjectedFault(msgspec.Struct, frozen=True):
    """A fault that was injected and is over: from its beginning until the cluster had recovered.

    ``problem`` describes a recovery that failed; times are of the monotonic clock, and a kill
    begins with the signal.  ``answered_s`` is when a router answered again after one had ended.
    ``part`` is the process or thread of an engine that was hit, if not all of the engine was.
    """

    planned: PlannedFault
    begin_s: float
    end_s: float
    problem: str = ""
    damaged_blocks: int = 0
    answered_s: float | None = None
    part: str = ""


#: How vLLM names the processes that an HTTP server starts.
_CORE_TITLE = b"VLLM::EngineCore"


def part_name(pid: int, leader: int, kind: EngineKind) -> str:
    """Return which part of an engine a process is; ``leader`` is the process that was started."""
    if pid == leader:
        return "HTTP server" if kind is EngineKind.VLLM else "first rank"
    with contextlib.suppress(OSError):
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(_CORE_TITLE):
            return "engine core"
    return "rank"


def thread_name(paused: PausedProcess, engine: str) -> str:
    """Return which thread of an engine has paused, without its number and the engine's name."""
    return f"thread {paused.thread.removeprefix(f'{engine}-').rstrip('-0123456789')}"


class FaultInjector:
    """Injects faults into a cluster under load."""

    def __init__(
        self, cluster: ChaosCluster, failpoints: FailpointServer, load: Load, block_tokens: int
    ) -> None:
        self._block_tokens = block_tokens
        self._cluster = cluster
        self._failpoints = failpoints
        self._load = load

    async def inject(self, planned: PlannedFault) -> InjectedFault | None:
        """Inject a fault and restore the cluster; None if its step was not reached in time."""
        paused = await self._failpoints.pause_at(
            planned.process, planned.step, planned.passes, _REACH_S
        )
        if paused is None:
            return None
        begin_s = time.monotonic()
        problem, damaged, part = "", 0, ""
        match planned.fault:
            case Fault.KILL | Fault.KILL_ONE | Fault.TERMINATE:
                return await self._end_and_restart(planned, paused)
            case Fault.OTHER_ROLE:
                problem = await self._change_roles(planned, paused)
            case Fault.STOP:
                problem = await self._stop(planned, paused)
            case Fault.STOP_ONE:
                problem, part = await self._stop_one(planned, paused)
            case Fault.HANG:
                part = thread_name(paused, planned.engine)
                problem = await self._hang(planned, paused)
            case Fault.SILENT_CONTROL | Fault.SILENT_HTTP:
                problem = await self._silence(planned, paused)
            case Fault.DROP_CONTROL | Fault.DROP_HTTP:
                problem = await self._drop_packets(planned, paused)
            case Fault.RESET_CONTROL | Fault.RESET_HTTP | Fault.RESET_CLIENTS:
                problem = await self._reset(planned, paused)
            case fault if fault in CORRUPTIONS or fault is Fault.REMOVED:
                damaged = await self._damage(planned)
                paused.resume()
            case _:
                await self._disk_fault(planned, paused)
        return InjectedFault(planned, begin_s, time.monotonic(), problem, damaged, part=part)

    async def _end_and_restart(self, planned: PlannedFault, paused: PausedProcess) -> InjectedFault:
        cluster, process = self._cluster, self._cluster.owner_of(paused.pid)
        name, ends_router = process.name, planned.component is Component.ROUTER
        # A router has no epoch, and a paused one does not answer.
        old_epoch = await cluster.epoch(name) if planned.component.is_engine else None
        part, killed = "", paused.pid
        if planned.fault is Fault.KILL_ONE:
            killed = self._one_process(planned, paused)
            part = part_name(killed, process.pid, cluster.settings.engines)
        begin_s = time.monotonic()
        if planned.fault is Fault.TERMINATE:
            process.terminate()
        else:
            os.kill(killed, signal.SIGKILL)
        paused.resume()
        code = await cluster.wait_ended(name, _END_S)
        problem = ""
        if code is None:
            problem = f"still runs {_END_S:g} s after {planned.fault.value}"
            process.kill()
            await cluster.wait_ended(name, _END_S)
        elif planned.fault is Fault.TERMINATE and code != 0:
            problem = f"exit code {code} after SIGTERM"
        if not await cluster.group_ended(process.pid, _END_S):
            problem = problem or f"child processes of {name} outlive it"
        problem = await self._end_siblings(name) or problem
        for rank in cluster.group(name):
            cluster.start(rank)
        answered_s = None
        if ends_router and await cluster.router_answers(_BACK_S):
            answered_s = time.monotonic()
        if not await self._recovered(planned, old_epoch):
            problem = problem or f"not back {_BACK_S:g} s after its restart"
        # The campaign restarts, and reports, other processes that have ended meanwhile.
        end_s = time.monotonic()
        return InjectedFault(planned, begin_s, end_s, problem, answered_s=answered_s, part=part)

    async def _change_roles(self, planned: PlannedFault, paused: PausedProcess) -> str:
        """Change an engine's group to the other role and back; return what failed."""
        paused.resume()
        own = self._cluster.role(planned.engine)
        other = Role.DECODE if own is Role.PREFILL else Role.PREFILL
        return await self._to_role(planned, other) or await self._to_role(planned, own)

    async def _to_role(self, planned: PlannedFault, role: Role) -> str:
        """Do what the supervisor of engines does when the router requests another role."""
        cluster, name = self._cluster, planned.engine
        old_epoch = await cluster.epoch(name)
        if not await cluster.request_role(name, role, _BACK_S):
            return f"the router refuses role {role.value} for {_BACK_S:g} s"
        group = cluster.group(name)
        for rank in group:
            cluster.process(rank).terminate()
        ended = [await cluster.wait_ended(rank, _END_S) for rank in group]
        problem = "" if set(ended) == {0} else f"exit codes {ended} after SIGTERM for another role"
        for rank in group:
            if cluster.process(rank).alive:
                cluster.process(rank).kill()
                await cluster.wait_ended(rank, _END_S)
        cluster.set_role(name, role)
        for rank in group:
            cluster.start(rank)
        if not await cluster.joined(name, old_epoch, _BACK_S):
            problem = problem or f"not {role.value} {_BACK_S:g} s after its restart"
        return problem

    async def _end_siblings(self, name: str) -> str:
        """Wait for the end of the other ranks of its group; return which did not end by itself."""
        problem = ""
        for rank in self._cluster.group(name):
            if rank != name and await self._cluster.wait_ended(rank, _END_S) is None:
                problem = f"{rank} still runs {_END_S:g} s after the end of {name}"
                self._cluster.process(rank).kill()
                await self._cluster.wait_ended(rank, _END_S)
        return problem

    async def _stop(self, planned: PlannedFault, paused: PausedProcess) -> str:
        # The process with its children; of an engine's ranks only one.
        group = self._cluster.owner_of(paused.pid).pid
        one_rank = planned.component.failure_domain is not planned.component
        with contextlib.suppress(ProcessLookupError):
            for number, wait_s in ((signal.SIGSTOP, planned.lasts_s), (signal.SIGCONT, 0.0)):
                if one_rank:
                    os.kill(paused.pid, number)
                else:
                    os.killpg(group, number)
                await asyncio.sleep(wait_s)
        paused.resume()
        return await self._not_back(planned, "SIGCONT")

    def _one_process(self, planned: PlannedFault, paused: PausedProcess) -> int:
        """Return one of an engine's processes: HTTP server, engine core or a rank."""
        group = self._cluster.owner_of(paused.pid).pid
        members = sorted(pid for pid, s in all_processes() if s.group == group and not s.is_zombie)
        return random.Random(planned.number).choice(members or [paused.pid])

    async def _stop_one(self, planned: PlannedFault, paused: PausedProcess) -> tuple[str, str]:
        """Stop one of an engine's processes; return what failed, and which part it is."""
        pid = self._one_process(planned, paused)
        leader = self._cluster.owner_of(paused.pid).pid
        part = part_name(pid, leader, self._cluster.settings.engines)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            paused.resume()  # The others go on.
            await asyncio.sleep(planned.lasts_s)
            os.kill(pid, signal.SIGCONT)
        paused.resume()
        return await self._not_back(planned, "SIGCONT"), part

    async def _hang(self, planned: PlannedFault, paused: PausedProcess) -> str:
        """Leave the thread that has paused where it is; its process goes on without it."""
        await asyncio.sleep(planned.lasts_s)
        paused.resume()
        return await self._not_back(planned, "its thread goes on")

    async def _silence(self, planned: PlannedFault, paused: PausedProcess) -> str:
        """Pass no bytes to or from one port of an engine, or in one direction only.

        Its relay accepts connections meanwhile, as a server that hangs.
        """
        cluster = self._cluster
        relays = cluster.http if planned.fault is Fault.SILENT_HTTP else cluster.control
        directions = random.Random(planned.number).choice(
            (tuple(Direction), *((direction,) for direction in Direction))
        )
        with relays[planned.process].silent(directions):
            paused.resume()
            await asyncio.sleep(planned.lasts_s)
        return await self._not_back(planned, "the silence")

    async def _drop_packets(self, planned: PlannedFault, paused: PausedProcess) -> str:
        """Drop all packets to a port: an engine's HTTP port, or the scheduler's port for it."""
        cluster, name = self._cluster, planned.process
        if planned.fault is Fault.DROP_CONTROL:
            dropped = cluster.control[name].drop_packets()
        else:
            dropped = cluster.drop_http(name)
        async with dropped:
            paused.resume()
            await asyncio.sleep(planned.lasts_s)
        return await self._not_back(planned, "the last dropped packet")

    async def _reset(self, planned: PlannedFault, paused: PausedProcess) -> str:
        name, cluster = planned.process, self._cluster
        match planned.fault:
            case Fault.RESET_CONTROL:
                cluster.control[name].reset()
            case Fault.RESET_HTTP:
                cluster.http[name].reset()
            case _:
                cluster.clients.reset()
        paused.resume()
        return await self._not_back(planned, "the reset")

    async def _disk_fault(self, planned: PlannedFault, paused: PausedProcess) -> None:
        share = _IO_ERROR_SHARE if planned.fault is Fault.IO_ERROR else 1.0
        self._failpoints.set_disk_fault(DiskFault(planned.fault, share, _SLOW_CALL_S))
        paused.resume()
        await asyncio.sleep(planned.lasts_s)
        self._failpoints.set_disk_fault(DiskFault())

    async def _damage(self, planned: PlannedFault) -> int:
        storage = self._cluster.storage
        if planned.fault is Fault.REMOVED:
            for folder in storage.iterdir():
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            return 0
        chance = random.Random(planned.number)
        agents = [agent for agent in self._load.agents if agent.context]
        keys = [
            key
            for agent in chance.sample(agents, min(_CONTEXTS_HIT, len(agents)))
            for key in block_keys(agent.context, self._block_tokens, cache_salt=agent.salt)
        ]
        files = await asyncio.to_thread(block_files, storage, keys)
        wanted = max(_BLOCKS_HIT, int(len(files) * _BLOCKS_SHARE))
        hit = chance.sample(files, min(wanted, len(files)))
        return await asyncio.to_thread(corrupt, hit, planned.fault, chance)

    async def _not_back(self, planned: PlannedFault, after: str) -> str:
        """Wait until what was hit has recovered; return the problem if it does not."""
        return "" if await self._recovered(planned) else f"not back {_BACK_S:g} s after {after}"

    async def _recovered(self, planned: PlannedFault, old_epoch: str | None = None) -> bool:
        """Wait until an engine has re-registered; after a fault of the router, until all have."""
        if planned.component is Component.ROUTER:
            return await self._cluster.all_registered(_BACK_S)
        if planned.component is Component.FRONT_END:
            return await self._cluster.serves_clients(_BACK_S)
        return await self._cluster.joined(planned.engine, old_epoch, _BACK_S)
