"""A small real cluster for router tests: engines that speak the protocol, and model work.

Engines have a FIFO buffer with slots that record what was written to them, and a store of blocks
they share; the model work checks that every slot holds what the transfer claims.  A slot in two
hands, KV of the wrong block, or a block without the window layers that are looked at, fails the
test.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from tests.control_network import Network

from dualpath.core import cluster, control, transfers
from dualpath.core import control as envelopes
from dualpath.core import control as request_messages
from dualpath.core.blocks import (
    BlockGeometry,
    StoreNamespace,
    block_keys,
)
from dualpath.core.cluster import GroupRank, HostProcess, Role
from dualpath.core.control import Message
from dualpath.core.errors import EngineLostError, TransportError
from dualpath.core.rates import Rates
from dualpath.core.sessions import REGISTER_INTERVAL_S
from dualpath.engine.control.link import RouterSession, has_events
from dualpath.router.engine_calls import Job, OpenCalls, TokenEvent
from dualpath.router.engines import EngineInfo

M = TypeVar("M", bound=Message)
BLOCK_TOKENS = 4
#: Of the second layer: of a hit it looks at the last block and at the end of the one before.
WINDOW_TOKENS = 6
NAMESPACE = StoreNamespace(
    model="tiny",
    dtype="float32",
    layout="test",
    geometry=BlockGeometry(BLOCK_TOKENS, ((64,), (64,)), layer_windows=(0, WINDOW_TOKENS)),
)
WITHOUT_WINDOWS = StoreNamespace(
    model="tiny",
    dtype="float32",
    layout="test",
    geometry=BlockGeometry(BLOCK_TOKENS, ((64,), (64,))),
)
#: Longer than any limit of the router; in virtual time it costs nothing.
GUARD_S = 3600.0


def keys_of(tokens: Sequence[int]) -> tuple[bytes, ...]:
    return tuple(block_keys(tokens, BLOCK_TOKENS))


def next_token(tokens: Sequence[int]) -> int:
    return (sum((i + 1) * t for i, t in enumerate(tokens)) * 31 + len(tokens)) % 1009


def expected(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def job(request_id: str, prompt: Sequence[int], max_new_tokens: int = 6, **options) -> Job:
    return Job(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        max_new_tokens=max_new_tokens,
        keys=keys_of(prompt),
        keys_for=keys_of,
        **options,
    )


class FakeEngine:
    """One engine process; ``restart`` begins the next epoch."""

    def __init__(
        self,
        engine_id: str,
        role: Role,
        stored: set[bytes],
        *,
        buffer_blocks: int = 64,
        mode: str = "dualpath",
        hbm_tokens: int = 100_000,
        namespace: StoreNamespace = NAMESPACE,
        limits: dict[str, int] | None = None,
        rates: Rates = Rates(),  # noqa: B008 - frozen
    ) -> None:
        self.engine_id, self.role, self.stored = engine_id, role, stored
        self.buffer_blocks, self.mode, self.hbm_tokens = buffer_blocks, mode, hbm_tokens
        self.namespace, self.rates = namespace, rates
        self.limits = {"max_model_len": 1000, "vocab_size": 1009} | (limits or {})
        self.version = control.PROTOCOL_VERSION
        self.generation = 0
        self.read_limit: Callable[[request_messages.Read], tuple[int, str | None]] = lambda read: (
            read.run.blocks.count,
            None,
        )
        self.unanswered: set[type] = set()
        #: The other engines by name, those from which it has fetched prompts, whether fetches go
        #: on, and why they fail, empty if they do not.
        self.others: dict[str, FakeEngine] = {}
        self.fetched: list[request_messages.Fetch] = []
        self.fetches = asyncio.Event()
        self.fetches.set()
        self.fetch_failure = ""
        #: Why it serves no part of hits of other engines' requests.
        self.third_refusal = ""
        self.heartbeats = True
        #: Whether its reports of stored chains arrive; they may be lost.
        self.reports_stored = False
        #: Whether storage refuses what it writes, as with a quota.
        self.is_refused = False
        #: ``KvInHbm`` is late: the router has it only with the answer to its next ``Sync``.
        self.tokens_come_first = False
        self.counters: dict[str, float] = {}
        self.core_hangs = False
        self.steps = 0
        self.draining: str | None = None
        self._arrived = asyncio.Event()
        #: By default each process is in a container of its own.
        self.process: HostProcess | None = None
        self.dp: GroupRank | None = None
        self.unsettled: tuple[str, ...] = ()
        self.quarantined: dict[str, list[int]] = {}
        self.writers: dict[str, cluster.Writer] = {}

    @property
    def epoch(self) -> str:
        return f"{self.engine_id}-{self.generation}"

    async def start(self, network: Network) -> "FakeEngine":
        self.generation += 1
        self.received: list[Message] = []
        self.dead = asyncio.Event()
        self.free = deque(range(self.buffer_blocks))
        self.content: dict[int, bytes] = {}
        self.windowless: set[int] = set()
        self.leases: dict[str, list[int]] = {}
        self.waiting: deque[tuple[str, int]] = deque()
        #: Requests of which it is a third DE.
        self.thirds: set[str] = set()
        self.quarantined = {}
        self.tenants: dict[str, int] = {}
        self.called: set[str] = set()
        self.keys: dict[str, tuple[bytes, ...]] = {}
        #: Reads that begin with a grant, and requests of which the router knows that they wait.
        self.reads: dict[str, request_messages.GrantRead] = {}
        self.announced: set[str] = set()
        self.taken: set[tuple[str, int]] = set()
        self.kv_in_hbm: set[str] = set()
        self.withheld: deque[control.EngineMessage] = deque()
        self.events: list[control.KvInHbm | control.RequestOver] = []
        self.served: set[str] = set()
        self.persisted: set[str] = set()
        self.new_blocks: dict[str, int] = {}
        self.chains: list[control.StoredChain] = []
        self.report_seq = 0
        self.writers = {}
        self.connection = network.connect()
        self.session: RouterSession[control.EngineMessage, control.RouterMessage] = RouterSession(
            self.hello, self.load, self._take, self._end, has_events
        )
        self.tasks = [asyncio.create_task(loop()) for loop in (self._receive, self._tick)]
        self._post(self.session.due(_now_s()))
        return self

    async def join(self, network: Network) -> "FakeEngine":
        await self.start(network)
        await self.saw(control.Registered)
        return self

    def hello(self, registration: int = 1) -> control.Register:
        return control.Register(
            version=self.version,
            address=cluster.EngineAddress(
                engine_id=self.engine_id,
                epoch=self.epoch,
                role=self.role,
                agents=(cluster.AgentAddress(self.epoch, b"metadata", ()),),
                process=self.process or HostProcess(f"container of {self.epoch}", 1, 1),
            ),
            namespace=self.namespace,
            api_url=f"http://{self.engine_id}",
            node=f"node of {self.engine_id}",
            group=f"{self.role.value} group",
            mode=self.mode,
            hbm_tokens=self.hbm_tokens,
            buffer_tokens=self.buffer_blocks * BLOCK_TOKENS,
            limits=self.limits,
            rates=self.rates,
            registration=registration,
            unsettled=self.unsettled,
            quarantined=tuple(self.quarantined),
            writers=tuple(self.writers.values()),
            dp=self.dp,
        )

    async def kill(self) -> None:
        """End without a word, as SIGKILL does."""
        self.dead.set()
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)
        self.connection.close()
        for task in self.tasks:
            if not task.cancelled():
                task.result()

    async def leave(self, *, settled: bool = True) -> None:
        """End in good order: a goodbye, if there is a session to say it in."""
        goodbye = control.Deregister(reason="it shuts down", settled=settled)
        self._post(self.session.leave(goodbye, _now_s()))
        await self.kill()

    async def saw(self, kind: type[M], wanted: Callable[[M], bool] | None = None) -> M:
        """Wait for a message from the router, received already or yet to come."""
        async with asyncio.timeout(GUARD_S):
            seen = 0
            while True:
                for message in self.received[seen:]:
                    if isinstance(message, kind) and (wanted is None or wanted(message)):
                        return message
                seen = len(self.received)
                await self.more_than(seen)

    def named_peers(self) -> list[cluster.EngineAddress]:
        """Return the peers that the router has named to this engine, in order."""
        named = []
        for message in self.received:
            match message:
                case control.PeerUp():
                    named.append(message.address)
                case control.Assign() if message.peer is not None:
                    named.append(message.peer)
        return named

    async def more_than(self, count: int) -> None:
        """Wait until more than ``count`` messages have been received."""
        while len(self.received) <= count:
            self._arrived.clear()
            await self._arrived.wait()

    def send(self, message: control.EngineMessage) -> None:
        """Send a message; events go with a report."""
        if isinstance(message, control.KvInHbm | control.RequestOver):
            self.events.append(message)
            self.report()
        else:
            self._post(self.session.send(message, _now_s()))

    def send_raw(self, *frames: bytes) -> None:
        self.connection.send(*frames)

    def _post(self, posted: Sequence[envelopes.FromEngine]) -> None:
        for envelope in posted:
            self.send_raw(envelopes.encode(envelope))

    def report(self) -> None:
        self._post(self.session.load(_now_s()))

    def load(self) -> control.Report:
        self.report_seq += 1
        self.steps += not self.core_hangs
        events, self.events = tuple(self.events), []
        chains, self.chains = tuple(self.chains), []
        return control.Report(
            report_seq=self.report_seq,
            stored=chains if self.reports_stored else (),
            load=control.Load(
                unfinished_requests=len(self.tenants),
                unfinished_tokens=sum(self.tenants.values()),
                read_queue_tokens=0,
                free_hbm_tokens=self.hbm_tokens,
                free_buffer_tokens=len(self.free) * BLOCK_TOKENS,
                unallocated_hbm_tokens=sum(
                    tokens
                    for name, tokens in self.tenants.items()
                    if self.role is Role.DECODE and name not in self.kv_in_hbm
                ),
            ),
            draining=self.draining,
            counters=self.counters,
            steps=self.steps,
            events=events,
            called=tuple(self.called.intersection(self.tenants)),
        )

    def idle(self) -> bool:
        """Whether nothing of any request is left here."""
        everything_free = len(self.free) == self.buffer_blocks
        return everything_free and not (self.tenants or self.waiting or self.leases)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(REGISTER_INTERVAL_S)
            if self.heartbeats:
                self._post(self.session.due(_now_s()))

    async def _receive(self) -> None:
        while True:
            envelope = envelopes.decode_router_message(await self.connection.receive())
            if isinstance(envelope.message, control.Refused):
                self._note(envelope.message)
            self._post(self.session.receive(envelope, _now_s()))

    def _take(self, message: control.RouterMessage) -> None:
        self._note(message)
        if type(message) not in self.unanswered:
            self.answer(message)

    def _note(self, message: control.RouterMessage) -> None:
        if not isinstance(message, control.Ack):
            self.received.append(message)
            self._arrived.set()

    def _end(self, reason: str) -> None:
        """The session ends: all requests are dropped, slots that a PE may write to quarantined."""
        self.waiting.clear()
        self.reads.clear()
        for request_id in [*self.leases]:
            settled = self.kv_in_hbm | self.persisted | self.thirds
            if self.role is Role.DECODE and request_id not in settled:
                self.quarantined[request_id] = self.leases.pop(request_id)
            else:
                self._free(request_id)
        self.tenants.clear()
        self.withheld.clear()
        self.events.clear()

    def answer(self, message: Message) -> None:
        match message:
            case control.Lookup():
                hit = 0
                while hit < len(message.keys) and message.keys[hit] in self.stored:
                    hit += 1
                self.send(control.LookupDone(call_id=message.call_id, hit_blocks=hit))
            case control.Sync():
                self._say_withheld()
                self.send(control.Synced(call_id=message.call_id))
            case request_messages.Assign():
                if (peer := message.peer) is not None:
                    self.writers[peer.epoch] = peer.writer
                self.tenants[message.request_id] = message.tokens
                self.keys[message.request_id] = message.keys
                if message.reserve_blocks > self.buffer_blocks:
                    del self.tenants[message.request_id]
                    self.send(
                        request_messages.Failed(
                            request_id=message.request_id, reason="it would never fit"
                        )
                    )
                elif message.fetch is not None:
                    self._fetch(message.request_id, message.fetch)
                elif message.reserve_blocks:
                    if message.read is not None:
                        self.reads[message.request_id] = message.read
                    self.waiting.append((message.request_id, message.reserve_blocks))
                    self._grant()
                    if message.request_id in self.reads:
                        self.announced.add(message.request_id)
                        self.send(request_messages.ReservationWaits(message.request_id))
                self.report()
            case request_messages.ReserveThird():
                self._reserve_third(message)
            case request_messages.Read():
                self._read(message)
            case request_messages.Persist():
                self._persist(message)
            case request_messages.Release():
                self._release(message)
            case control.PeerUp():
                self.writers[message.address.epoch] = message.address.writer
                if message.call_id and control.Sync not in self.unanswered:
                    self.send(control.Synced(message.call_id))
            case control.PeerDown():
                if message.certain:
                    self.writers.pop(message.epoch, None)

    def _grant(self) -> None:
        while self.waiting and self.waiting[0][1] <= len(self.free):
            request_id, count = self.waiting.popleft()
            slots = [self.free.popleft() for _ in range(count)]
            for slot in slots:
                self.content.pop(slot, None)
            self.leases[request_id] = slots
            read = self.reads.pop(request_id, None)
            run = None if read is None else read.behind(0)
            if read is None or run is None or read.announced or request_id in self.announced:
                self.send(
                    request_messages.Reserved(request_id=request_id, slots=tuple(slots), wait_s=0.0)
                )
            if read is not None and run is not None:
                end = read.first_slot + run.blocks.count
                self._take(
                    request_messages.Read(
                        request_id,
                        run.with_slots(slots[read.first_slot : end]),
                        read.first_slot,
                        read.deadline_s,
                    )
                )

    def _fetch(self, request_id: str, fetch: request_messages.Fetch) -> None:
        """Copy the slots of another engine, at once or when ``fetches`` is set."""
        self.fetched.append(fetch)
        count = len(fetch.slots)
        if self.waiting or count > len(self.free):
            failure = f"{len(self.free)} of {self.buffer_blocks} blocks are free"
            self.send(request_messages.FetchDone(request_id, failure=failure))
            return
        slots = [self.free.popleft() for _ in range(count)]
        self.leases[request_id] = slots
        self.tasks.append(asyncio.create_task(self._copy(request_id, fetch, slots)))

    async def _copy(self, request_id: str, fetch: request_messages.Fetch, slots: list[int]) -> None:
        await self.fetches.wait()
        source = self.others[fetch.engine_id]
        if self.leases.get(request_id) != slots:
            return  # It was released meanwhile.
        if self.fetch_failure or source.dead.is_set() or source.epoch != fetch.epoch:
            failure = self.fetch_failure or f"{fetch.engine_id} is gone"
            self.send(request_messages.FetchDone(request_id, failure=failure))
            return
        for here, there in zip(slots, fetch.slots, strict=True):
            assert there in source.leases[request_id], "a slot is read after its release"
            self.content[here] = source.content[there]
            self.windowless -= {here}
            self.windowless |= {here} if there in source.windowless else set()
        self.send(request_messages.FetchDone(request_id, tuple(slots)))

    def _reserve_third(self, message: request_messages.ReserveThird) -> None:
        """Lease slots at once, with the blocks that are cached, or refuse."""
        count, left = len(message.keys), len(self.free) - message.spare_blocks
        if self.third_refusal or self.waiting or count > left:
            reason = self.third_refusal or "no room"
            self.send(request_messages.ThirdRefused(message.request_id, reason))
            return
        slots = [self.free.popleft() for _ in range(count)]
        for slot in slots:
            self.content.pop(slot, None)
        cached = message.keys[: message.cached_blocks]
        self.content.update(zip(slots, cached, strict=False))
        self.windowless.difference_update(slots)
        self.leases[message.request_id] = slots
        self.keys[message.request_id] = message.keys
        self.thirds.add(message.request_id)
        self.send(
            request_messages.Reserved(message.request_id, tuple(slots), 0.0, message.cached_blocks)
        )

    def _read(self, read: request_messages.Read) -> None:
        slots = self.leases.get(read.request_id)
        if slots is None:
            return
        good, reason = self.read_limit(read)
        keys = self.keys[read.request_id][read.first_key :]
        for i in range(good):
            assert keys[i] in self.stored
            assert read.run.slots[i] in slots
            slot = read.run.slots[i]
            self.content[slot] = keys[i]
            self.windowless -= {slot}
            self.windowless |= {slot} if i < read.run.windowless else set()
        self.send(
            request_messages.ReadDone(
                request_id=read.request_id,
                good_blocks=good,
                reason=reason,
                bytes_read=good,
                queue_s=0.0,
                read_s=0.0,
                slots=tuple(slots),
            )
        )

    def _persist(self, message: request_messages.Persist) -> None:
        if message.request_id in self.persisted:
            return
        keys = self.keys[message.request_id][message.first_block : message.blocks]
        if self.mode != "oracle":
            slots = self.leases[message.request_id][message.first_block :]
            for slot, key in zip(slots, keys, strict=False):
                assert self.content[slot] == key
                assert slot not in self.windowless
        self.new_blocks[message.request_id] = len({*keys} - self.stored)
        if not self.is_refused:
            self.stored.update(keys)
        self.persisted.add(message.request_id)
        self._free_if_over(message.request_id)

    def take_call(self, request_id: str, assignment: transfers.CallAssignment) -> None:
        """Count a request that was assigned with its call, once in its session."""
        name = assignment.session, assignment.number
        if assignment.session == self.session.session and name not in self.taken:
            self.taken.add(name)
            self.tenants[request_id] = assignment.tokens
            self.called.add(request_id)
            self.report()

    def decode_transfer(self, transfer: transfers.DecodeTransfer) -> None:
        """The KV is in HBM, and the prompt's new blocks are stored."""
        request_id, first = transfer.request_id, transfer.persist_from
        assert first is not None
        if (keys := self.keys.get(request_id)) is not None and request_id in self.tenants:
            blocks = min(len(keys), len(transfer.slots)) if self.mode != "oracle" else len(keys)
            order = request_messages.Persist(request_id, first, blocks, transfer.tenant)
            self._note(order)
            self._persist(order)
        self.kv_in_hbm.add(request_id)
        self.served.add(request_id)
        self.withheld.append(request_messages.KvInHbm(request_id=request_id, h2d_s=0.0))
        if not self.tokens_come_first:
            self._say_withheld()
        self._free_if_over(request_id)

    def ended(self, request_id: str) -> None:
        """A request has ended at this DE, which releases it."""
        if request_id in self.served & self.persisted and request_id in self.tenants:
            self.tenants.pop(request_id)
            if keys := self.keys[request_id]:
                new_blocks = self.new_blocks[request_id]
                self.chains.append(control.StoredChain(keys[-1], (), new_blocks))
            self.withheld.append(request_messages.RequestOver(request_id))
            if not self.tokens_come_first:
                self._say_withheld()

    def _say_withheld(self) -> None:
        while self.withheld:
            self.send(self.withheld.popleft())

    def _free_if_over(self, request_id: str) -> None:
        if request_id in self.kv_in_hbm and request_id in self.persisted:
            self._free(request_id)

    def _free(self, request_id: str) -> None:
        self.free.extend(self.leases.pop(request_id, ()))
        assert len(set(self.free)) == len(self.free)
        self._grant()

    def _release(self, message: request_messages.Release) -> None:
        self.taken.add((self.session.session, message.assignment))
        self.tenants.pop(message.request_id, None)
        self.waiting = deque(w for w in self.waiting if w[0] != message.request_id)
        self.reads.pop(message.request_id, None)
        if message.writer_certain:
            self.free.extend(self.quarantined.pop(message.request_id, ()))
            self._free(message.request_id)
        elif message.request_id in self.leases:
            self.quarantined[message.request_id] = self.leases.pop(message.request_id)
        self.send(request_messages.Released(request_id=message.request_id))
        self.report()


class FakeCalls:
    """Model work in which each token depends on all tokens before it.

    ``gates`` maps "prefill" or "decode" to an event the work waits for; ``entered`` says that it
    has got there.  The decode gate is asked after ``gate_after_tokens`` tokens.
    """

    def __init__(self) -> None:
        self.engines: dict[str, FakeEngine] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.entered: dict[str, asyncio.Event] = {
            "prefill": asyncio.Event(),
            "decode": asyncio.Event(),
        }
        self.gate_after_tokens = 0
        self.end_token: int | None = None
        self.errors: deque[Exception] = deque()
        self.gives_up_once: str | None = None
        self.send_failure: str | None = None
        #: Engines without their HTTP server, though their control link lives.
        self.deaf: set[str] = set()
        #: Engines with an HTTP server that accepts connections and never answers.
        self.mute: set[str] = set()
        #: Calls that each engine's server has, and for how long it has sent nothing of them.
        self.open: dict[str, dict[str, float | None]] = {}
        self.inquiries: list[str] = []
        self.transfers: list[transfers.PrefillTransfer] = []
        self.prefills: list[str] = []
        self.decodes: list[str] = []
        self.pause: Callable[[], Awaitable[None]] = _now

    async def prefill(
        self, engine: EngineInfo, job: Job, prefill_transfer: transfers.PrefillTransfer
    ) -> TokenEvent:
        self.transfers.append(prefill_transfer)
        self.prefills.append(engine.engine_id)
        if self.errors:
            raise self.errors.popleft()
        here, there = self.engines[engine.engine_id], self.engines[prefill_transfer.decode_engine]
        if (assignment := prefill_transfer.assignment) is not None:
            here.take_call(prefill_transfer.request_id, assignment)
        with self._listed(engine, prefill_transfer.request_id):
            await self._pass("prefill", here)
        if there.dead.is_set() or there.epoch != prefill_transfer.decode_epoch:
            raise TransportError(f"{there.engine_id} is gone")
        for third in prefill_transfer.thirds:
            serving = self.engines[third.engine_id]
            if serving.dead.is_set() or serving.epoch != third.epoch:
                raise TransportError(f"{third.engine_id} is gone")
        self._check_alive(here, engine)
        if prefill_transfer.request_id not in here.tenants:
            raise TransportError(f"{here.engine_id} has ended the session of this request")
        self._check_hits(here, there, job, prefill_transfer)
        for block, slot in enumerate(prefill_transfer.de_slots):
            assert there.leases[prefill_transfer.request_id][block] == slot
            there.content[slot] = job.keys[block] if block < len(job.keys) else b"partial"
            if block >= prefill_transfer.hit_blocks:
                there.windowless -= {slot}
        if self.gives_up_once is not None:
            reason, self.gives_up_once = self.gives_up_once, None
            if self.send_failure is not None:
                self._prefill_done(here, prefill_transfer)
            return TokenEvent(token_ids=(), finish_reason=reason)
        self._prefill_done(here, prefill_transfer)
        token = next_token(job.prompt_token_ids)
        return TokenEvent(
            token_ids=(token,), finish_reason="stop" if token == self.end_token else "length"
        )

    def _prefill_done(self, here: FakeEngine, transfer: transfers.PrefillTransfer) -> None:
        if self.send_failure is None:
            here.tenants.pop(transfer.request_id, None)
            here._free(transfer.request_id)
        here.send(request_messages.PrefillDone(transfer.request_id, failure=self.send_failure))
        here.report()
        self.send_failure = None

    async def decode(
        self,
        engine: EngineInfo,
        job: Job,
        decode_transfer: transfers.DecodeTransfer,
        prior: Sequence[int],
    ) -> AsyncIterator[TokenEvent]:
        here = self.engines[engine.engine_id]
        self._check_alive(here, engine)
        self.decodes.append(engine.engine_id)
        for block, slot in enumerate(decode_transfer.slots):
            wanted = job.keys[block] if block < len(job.keys) else b"partial"
            assert here.content[slot] == wanted
        if self.gate_after_tokens == 0:
            with self._listed(engine, decode_transfer.request_id):
                await self._pass("decode", here)
        self._check_alive(here, engine)
        here.decode_transfer(decode_transfer)
        tokens = [*job.prompt_token_ids, *prior]
        left = job.max_new_tokens - len(prior)
        for number in range(left):
            if number and number == self.gate_after_tokens:
                with self._listed(engine, decode_transfer.request_id):
                    await self._pass("decode", here)
            await self.pause()
            self._check_alive(here, engine)
            tokens.append(next_token(tokens))
            last = number == left - 1
            if last:
                here.ended(decode_transfer.request_id)
            yield TokenEvent(token_ids=(tokens[-1],), finish_reason="length" if last else None)

    async def answers(self, engine: EngineInfo) -> None:
        if engine.engine_id in self.mute:
            await asyncio.Event().wait()
        if engine.engine_id in self.deaf:
            raise EngineLostError(f"{engine.engine_id} refuses connections")
        self._check_alive(self.engines[engine.engine_id], engine)

    async def open_calls(self, engine: EngineInfo) -> OpenCalls | None:
        self.inquiries.append(engine.engine_id)
        await self.answers(engine)
        return dict(self.open.get(engine.engine_id, {}))

    @contextlib.contextmanager
    def _listed(self, engine: EngineInfo, call_id: str) -> Iterator[None]:
        calls = self.open.setdefault(engine.engine_id, {})
        calls[call_id] = None
        try:
            yield
        finally:
            calls.pop(call_id, None)

    def _check_alive(self, here: FakeEngine, info: EngineInfo) -> None:
        if here.dead.is_set() or here.epoch != info.epoch:
            raise EngineLostError(f"connection to {here.engine_id} is reset")

    def _check_hits(
        self, here, there, job: Job, prefill_transfer: transfers.PrefillTransfer
    ) -> None:
        block = 0
        for run in prefill_transfer.hits:
            assert run.blocks.first == block
            side = here if run.side is Role.PREFILL else there
            if run.third:
                assert run.third in {third.engine_id for third in prefill_transfer.thirds}
                side = self.engines[run.third]
            for slot in run.slots:
                assert slot in side.leases[prefill_transfer.request_id]
                assert side.content[slot] == job.keys[block]
                behind = prefill_transfer.hit_blocks - block - 1
                looked_at = behind * BLOCK_TOKENS + 1 < WINDOW_TOKENS
                assert not (looked_at and slot in side.windowless)
                assert block >= run.whole_from or not looked_at
                block += 1
        if prefill_transfer.de_slots:
            assert block == prefill_transfer.hit_blocks
        if prefill_transfer.hit_blocks:
            assert prefill_transfer.hit_key_tail == job.keys[prefill_transfer.hit_blocks - 1]

    async def _pass(self, name: str, engine: FakeEngine) -> None:
        self.entered[name].set()
        await self.pause()
        died = asyncio.ensure_future(engine.dead.wait())
        gate = asyncio.ensure_future(self.gates[name].wait() if name in self.gates else _now())
        try:
            await asyncio.wait({died, gate}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            died.cancel()
            gate.cancel()
        if engine.dead.is_set():
            raise EngineLostError(f"connection to {engine.engine_id} is reset")


async def _now() -> None:
    return


def _now_s() -> float:
    return asyncio.get_running_loop().time()
