"""A campaign: faults on a cluster under load, one after the other or several at once, then calm."""

import asyncio
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.errors import EngineLostError
from dualpath.laboratory.chaos.account import Account, account, named
from dualpath.laboratory.chaos.cluster import ChaosCluster
from dualpath.laboratory.chaos.kinds import Victims
from dualpath.laboratory.chaos.leftovers import Leftovers
from dualpath.laboratory.chaos.load import Load
from dualpath.laboratory.chaos.matrix import Component, Fault, Strike, strikes
from dualpath.laboratory.chaos.settings import ChaosSettings, LoadSettings
from dualpath.laboratory.chaos.strike import Made, Striker
from dualpath.laboratory.chaos.tally import loaded_blocks
from dualpath.laboratory.chaos.watch import Watch

#: What no log may hold: the verifier's word for wrong KV, and a defect nobody caught.
_WRONG_KV = "this is a defect of the data path"
_TRACEBACK = "Traceback (most recent call last)"
_TICK_S = 5.0
#: The last line of a traceback, behind what vLLM's logging puts in front of every line.
_RAISED = re.compile(r"^(?:\(.*\] )?([A-Za-z_][\w.]*(?:Error|Exit|Exception|Interrupt)\b.*)$", re.M)
_RAISED_CHARACTERS = 200

Progress = Callable[[str], None]


class CampaignResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a campaign found; ``victims`` says in words which engines they were.

    ``missed`` counts faults whose step was not reached in time, by component and step; ``left`` is
    what was found in a calm cluster; ``troubles`` are processes that did not end or come back as
    they should; ``wrong_kv`` and ``tracebacks`` count lines of logs; ``load_average`` is the
    machine's over the last 15 minutes.
    """

    settings: ChaosSettings
    load: LoadSettings
    victims: str
    account: Account
    faults: int
    missed: dict[str, int]
    left: tuple[str, ...]
    troubles: dict[str, int]
    loaded_blocks: int
    refused_blocks: int
    damaged_blocks: int
    wrong_kv: int
    tracebacks: dict[str, int]
    seconds: float
    load_average: float

    @property
    def is_clean(self) -> bool:
        """Whether nothing was late, wrong, unclear or left."""
        bad = self.account.bad_turns
        return not (bad or self.left or self.wrong_kv or self.troubles)


class Campaign:
    """Runs one campaign in ``folder``, which gets all logs; ``progress`` hears how far it is."""

    def __init__(
        self,
        settings: ChaosSettings,
        load: LoadSettings,
        victims: Victims,
        folder: Path,
        progress: Progress,
    ) -> None:
        self._victims = victims
        self._settings = settings
        self._load_settings = load
        self._folder = folder
        self._progress = progress
        self._made: list[Made] = []
        self._missed: Counter[str] = Counter()
        self._ended_alone: Counter[str] = Counter()
        self._left: list[str] = []
        self._last_left: list[str] = []

    async def run(self) -> CampaignResult:
        """Make all faults and return what came of it.

        Raises ``EngineLostError`` or ``DeadlineError`` if the cluster does not come up.
        """
        settings = self._settings
        self._begin_s = time.monotonic()
        async with AsyncExitStack() as stack:
            # A socket's path may not be long.
            short = stack.enter_context(tempfile.TemporaryDirectory(prefix="dualpath-chaos-"))
            gates = Path(short) / "gates"
            watch = await stack.enter_async_context(Watch(gates))
            self._cluster = await stack.enter_async_context(
                ChaosCluster(settings, self._load_settings, self._victims, self._folder, gates)
            )
            status = await self._cluster.status()
            if status is None:
                raise EngineLostError(f"the router does not answer; see {self._folder}")
            self._leftovers = Leftovers(self._cluster, status)
            self._load = await stack.enter_async_context(
                Load(self._cluster.url, self._load_settings, self._victims, settings.seed)
            )
            self._striker = Striker(self._cluster, watch, self._load, self._victims.block_tokens)
            await self._strike_all()
        return self._result(time.monotonic() - self._begin_s)

    # ------------------------------------------------------------------ faults

    async def _strike_all(self) -> None:
        """Make faults until there are enough and enough blocks were loaded."""
        drawn = strikes(
            self._settings.seed,
            self._cluster.cast,
            self._settings.components,
            {*self._settings.without, *self._victims.impossible, *self._too_few()},
        )
        while (left := self._settings.faults - len(self._made)) > 0 and not self._over:
            await self._strike_some(drawn, min(self._settings.calm_every, left))
            if left > self._settings.calm_every:
                await self._calm()
        while self._loaded < self._settings.blocks and not self._over:
            await asyncio.sleep(_TICK_S)
            self._load.check()
            self._say()
        await self._calm()

    def _too_few(self) -> set[Fault]:
        """Return what cannot be done to so few engines: the last of a role keeps it."""
        fewest = min(self._settings.groups(role) for role in Role)
        return {Fault.OTHER_ROLE} if fewest < 2 else set()

    @property
    def _over(self) -> bool:
        return time.monotonic() - self._begin_s > self._settings.most_s

    @property
    def _loaded(self) -> int:
        return loaded_blocks(self._cluster.tallies)[0]

    async def _strike_some(self, drawn: Iterator[Strike], count: int) -> None:
        """Make ``count`` faults, at most one of a component at a time."""
        wanted = len(self._made) + count
        busy: set[Component] = set()
        running: set[asyncio.Task[None]] = set()
        put_back: list[Strike] = []
        while len(self._made) < wanted and not self._over:
            while len(running) < min(self._settings.at_once, wanted - len(self._made)):
                strike = self._next(drawn, put_back, busy)
                busy.add(strike.component.whole)
                running.add(asyncio.create_task(self._one(strike, busy)))
            over, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in over:
                task.result()
            self._load.check()
            self._revive(busy)
        for task in running:
            await task

    def _revive(self, busy: set[Component]) -> None:
        """Start what has ended though nothing was done to it, and say so."""
        for name, code in self._cluster.ended_alone(busy):
            self._ended_alone[f"{name} ended on its own with exit code {code}"] += 1
            self._progress(f"{name} ended on its own with exit code {code}; see its log")
            self._cluster.start(name)

    def _next(
        self, drawn: Iterator[Strike], put_back: list[Strike], busy: set[Component]
    ) -> Strike:
        for strike in put_back:
            if strike.component.whole not in busy:
                put_back.remove(strike)
                return strike
        while (strike := next(drawn)).component.whole in busy:
            put_back.append(strike)
        return strike

    async def _one(self, strike: Strike, busy: set[Component]) -> None:
        try:
            made = await self._striker.make(strike)
        finally:
            busy.discard(strike.component.whole)
        if made is None:
            self._missed[f"{strike.component.value}, {strike.step.value}"] += 1
            return
        self._made.append(made)
        if len(self._made) % 10 == 0:
            self._say()

    async def _calm(self) -> None:
        """Let nobody ask, look for what is left, go on."""
        await self._load.pause()
        left = await self._leftovers.found()
        for what in left:
            # What stays is one thing, however often it is found.
            if what not in self._last_left:
                self._left.append(f"after {len(self._made)} faults: {what}")
                self._progress(f"left {self._left[-1]}")
        self._last_left = left
        self._load.resume()

    def _say(self) -> None:
        good, refused = loaded_blocks(self._cluster.tallies)
        self._progress(
            f"{len(self._made)} faults, {sum(self._missed.values())} not reached, "
            f"{len(self._load.turns)} requests, {good} blocks loaded, {refused} refused"
        )

    # ------------------------------------------------------------------ what it comes to

    def _result(self, seconds: float) -> CampaignResult:
        good, refused = loaded_blocks(self._cluster.tallies)
        logs = [self._cluster.log(name) for name in self._cluster.names]
        return CampaignResult(
            settings=self._settings,
            load=self._load_settings,
            victims=self._victims.described,
            account=account(
                *(self._load.turns, self._made, self._load_settings.request_deadline_s),
                Component.FRONT_END if self._settings.front_ends else Component.ROUTER,
            ),
            faults=len(self._made),
            missed=dict(self._missed),
            left=tuple(self._left),
            troubles=dict(
                Counter(f"{named(m)}: {m.trouble}" for m in self._made if m.trouble)
                + self._ended_alone
            ),
            loaded_blocks=good,
            refused_blocks=refused,
            damaged_blocks=sum(made.damaged_blocks for made in self._made),
            wrong_kv=sum(log.read_text(errors="replace").count(_WRONG_KV) for log in logs),
            tracebacks=dict(Counter(last for log in logs for last in _last_lines(log))),
            seconds=seconds,
            load_average=os.getloadavg()[-1],
        )


def _last_lines(log: Path) -> Iterator[str]:
    """Yield the last line of each traceback in a log: what was raised."""
    text = log.read_text(errors="replace")
    for trace in text.split(_TRACEBACK)[1:]:
        raised = _RAISED.search(trace)
        yield raised.group(1)[:_RAISED_CHARACTERS] if raised else "(cut off)"
