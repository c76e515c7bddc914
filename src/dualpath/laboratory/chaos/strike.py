"""Faults as they are made: signals, connections cut, a disk that fails, blocks that rot."""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import time

import msgspec

from dualpath.core.blocks import block_keys
from dualpath.core.cluster import Role
from dualpath.laboratory.chaos.cluster import ChaosCluster
from dualpath.laboratory.chaos.corruption import block_files, corrupt
from dualpath.laboratory.chaos.gate import Disk
from dualpath.laboratory.chaos.load import Load
from dualpath.laboratory.chaos.matrix import CORRUPTIONS, Component, Fault, Strike
from dualpath.laboratory.chaos.watch import Standing, Watch

_REACH_S = 6.0
_END_S = 45.0
_BACK_S = 60.0
_SLOW_CALL_S = 0.05
_IO_ERROR_SHARE = 0.5
#: Of the stored blocks of some agents: at least so many, or that share.
_BLOCKS_HIT = 12
_BLOCKS_SHARE = 0.02
_CONTEXTS_HIT = 4


class Made(msgspec.Struct, frozen=True):
    """A fault that was made and is over: from its begin until all was back as it should be.

    ``trouble`` says what was not as it should be; times are those of the monotonic clock, of a kill
    its own.  ``answered_s`` is when a router answered again after one had ended.
    """

    strike: Strike
    begin_s: float
    end_s: float
    trouble: str = ""
    damaged_blocks: int = 0
    answered_s: float | None = None


class Striker:
    """Makes faults on a cluster under load."""

    def __init__(self, cluster: ChaosCluster, watch: Watch, load: Load, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._cluster = cluster
        self._watch = watch
        self._load = load

    async def make(self, strike: Strike) -> Made | None:
        """Make a fault and mend it; None if its step was not reached in time."""
        standing = await self._watch.reach(strike.process, strike.step, strike.passes, _REACH_S)
        if standing is None:
            return None
        begin_s = time.monotonic()
        trouble, damaged = "", 0
        match strike.fault:
            case Fault.KILL | Fault.TERMINATE:
                return await self._end_and_restart(strike, standing)
            case Fault.OTHER_ROLE:
                trouble = await self._change_roles(strike, standing)
            case Fault.STOP:
                trouble = await self._stop(strike, standing)
            case Fault.RESET_CONTROL | Fault.RESET_HTTP | Fault.RESET_CLIENTS:
                trouble = await self._reset(strike, standing)
            case fault if fault in CORRUPTIONS or fault is Fault.REMOVED:
                damaged = await self._damage(strike)
                standing.go_on()
            case _:
                await self._bad_disk(strike, standing)
        return Made(strike, begin_s, time.monotonic(), trouble, damaged)

    async def _end_and_restart(self, strike: Strike, standing: Standing) -> Made:
        cluster, process = self._cluster, self._cluster.owner_of(standing.pid)
        name, ends_router = process.name, strike.component is Component.ROUTER
        # A router has no epoch, and one that stands still answers nothing.
        old_epoch = await cluster.epoch(name) if strike.component.is_engine else None
        begin_s = time.monotonic()
        if strike.fault is Fault.KILL:
            os.kill(standing.pid, signal.SIGKILL)
        else:
            process.terminate()
        standing.go_on()
        code = await cluster.ended(name, _END_S)
        trouble = ""
        if code is None:
            trouble = f"runs on {_END_S:g} s after {strike.fault.value}"
            process.kill()
            await cluster.ended(name, _END_S)
        elif strike.fault is Fault.TERMINATE and code != 0:
            trouble = f"exit code {code} after SIGTERM"
        if not await cluster.nothing_left_of(process.pid, _END_S):
            trouble = trouble or f"processes of {name} outlive it"
        trouble = await self._end_siblings(name) or trouble
        for rank in cluster.group(name):
            cluster.start(rank)
        answered_s = None
        if ends_router and await cluster.answers(_BACK_S):
            answered_s = time.monotonic()
        if not await self._there(strike, old_epoch):
            trouble = trouble or f"not back {_BACK_S:g} s after its restart"
        # What has ended meanwhile the campaign starts again, and says so.
        return Made(strike, begin_s, time.monotonic(), trouble, answered_s=answered_s)

    async def _change_roles(self, strike: Strike, standing: Standing) -> str:
        """Let an engine's group change to the other role and back; return what went wrong."""
        standing.go_on()
        own = self._cluster.role(strike.engine)
        other = Role.DECODE if own is Role.PREFILL else Role.PREFILL
        return await self._to_role(strike, other) or await self._to_role(strike, own)

    async def _to_role(self, strike: Strike, role: Role) -> str:
        """Do what who supervises engines does when the router wishes for another role."""
        cluster, name = self._cluster, strike.engine
        old_epoch = await cluster.epoch(name)
        if not await cluster.ask_for_role(name, role, _BACK_S):
            return f"may not become {role.value} for {_BACK_S:g} s"
        group = cluster.group(name)
        for rank in group:
            cluster.process(rank).terminate()
        ended = [await cluster.ended(rank, _END_S) for rank in group]
        trouble = "" if set(ended) == {0} else f"exit codes {ended} after SIGTERM for another role"
        for rank in group:
            if cluster.process(rank).alive:
                cluster.process(rank).kill()
                await cluster.ended(rank, _END_S)
        cluster.give_role(name, role)
        for rank in group:
            cluster.start(rank)
        if not await cluster.joined(name, old_epoch, _BACK_S):
            trouble = trouble or f"not {role.value} {_BACK_S:g} s after its restart"
        return trouble

    async def _end_siblings(self, name: str) -> str:
        """Wait for the end of the other ranks of its group; say which did not end by itself."""
        trouble = ""
        for rank in self._cluster.group(name):
            if rank != name and await self._cluster.ended(rank, _END_S) is None:
                trouble = f"{rank} runs on {_END_S:g} s after the end of {name}"
                self._cluster.process(rank).kill()
                await self._cluster.ended(rank, _END_S)
        return trouble

    async def _stop(self, strike: Strike, standing: Standing) -> str:
        # All of the process: what it has started itself, too; of an engine's ranks one alone.
        group = self._cluster.owner_of(standing.pid).pid
        one_rank = strike.component.whole is not strike.component
        with contextlib.suppress(ProcessLookupError):
            for number, wait_s in ((signal.SIGSTOP, strike.lasts_s), (signal.SIGCONT, 0.0)):
                if one_rank:
                    os.kill(standing.pid, number)
                else:
                    os.killpg(group, number)
                await asyncio.sleep(wait_s)
        standing.go_on()
        return "" if await self._there(strike) else f"not back {_BACK_S:g} s after SIGCONT"

    async def _reset(self, strike: Strike, standing: Standing) -> str:
        name, cluster = strike.process, self._cluster
        relay = {
            Fault.RESET_CONTROL: cluster.control[name],
            Fault.RESET_HTTP: cluster.http[name],
            Fault.RESET_CLIENTS: cluster.clients,
        }[strike.fault]
        relay.reset()
        standing.go_on()
        return "" if await self._there(strike) else f"not back {_BACK_S:g} s after the reset"

    async def _bad_disk(self, strike: Strike, standing: Standing) -> None:
        share = _IO_ERROR_SHARE if strike.fault is Fault.IO_ERROR else 1.0
        self._watch.trouble(Disk(strike.fault, share, _SLOW_CALL_S))
        standing.go_on()
        await asyncio.sleep(strike.lasts_s)
        self._watch.trouble(Disk())

    async def _damage(self, strike: Strike) -> int:
        storage = self._cluster.storage
        if strike.fault is Fault.REMOVED:
            for folder in storage.iterdir():
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            return 0
        chance = random.Random(strike.number)
        agents = [agent for agent in self._load.agents if agent.context]
        keys = [
            key
            for agent in chance.sample(agents, min(_CONTEXTS_HIT, len(agents)))
            for key in block_keys(agent.context, self._block_tokens, cache_salt=agent.salt)
        ]
        files = await asyncio.to_thread(block_files, storage, keys)
        wanted = max(_BLOCKS_HIT, int(len(files) * _BLOCKS_SHARE))
        hit = chance.sample(files, min(wanted, len(files)))
        return await asyncio.to_thread(corrupt, hit, strike.fault, chance)

    async def _there(self, strike: Strike, old_epoch: str | None = None) -> bool:
        """Wait until an engine is known again, under another epoch than that; all, to a router."""
        if strike.component is Component.ROUTER:
            return await self._cluster.all_there(_BACK_S)
        if strike.component is Component.FRONT_END:
            return await self._cluster.serves_clients(_BACK_S)
        return await self._cluster.joined(strike.engine, old_epoch, _BACK_S)
