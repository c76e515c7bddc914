"""``RequestScheduler``: events in, effects out (§6.1).  No clock, no I/O, no randomness.

A submitted request waits in two queues at once, for a PE and for a DE; when both are known its
reads are planned and the assignment is dispatched.  Engines fetch by group.

The driver (router or simulator) has to

- name in ``EngineReport.uncounted`` the requests that the engine was assigned and does not count;
- let ``EngineReport.load`` include the reads of counted requests that the engine was not sent yet
  (they wait for buffer space);
- apply ``SlotsGranted`` when a DE has granted a request's slots, and only then notify its PE of a
  request if engines were believed to cache a part of its hit;
- after ``EngineLost`` submit the lost requests again, or fail them.

*Order.*  First come, first served by ``Submitted``, in both queues.  A request submitted again
after a loss is queued at the end.  This keeps the two queues free of deadlock: whenever a request
holds a PE and waits for HBM at a DE, everything that holds that HBM is older and so has a PE as
well, and finishes.  So that it stays true, requests that hold only a DE release it and are queued
again, in order, when engines come or go; when an engine is paused, those that hold only a PE do so
as well.

*A request with a given PE* (chosen by a proxy in front of the engines) waits for a DE only, and
has its PE from the moment it has a DE.  So it never holds a PE while it waits for HBM, and the
order above stays free of deadlock.  α and β do not apply: the proxy has decided.  A DE that it
names is taken at once if that overtakes no other request, else a DE is chosen by the rules.

*A request that only one DE may serve* gets it at once or is refused.  It is older than all that
will wait for a DE, so it gets a PE before them.

*Weight of a request.*  tokens(r) at the PE is its prompt, and more from its assignment on if hits
are recomputed (``policy.read_side``); len_r at the DE is its prompt and, at most
``generated_reserve_tokens``, what it may generate.

*Reads* are planned when a request is assigned, with the blocks that its engines were believed to
cache when it was submitted.  Until its DE has granted the slots, these may have been evicted: then
the reads are planned again, as if the request had no read and no computation on its account yet.
Its engines stay.  The same is done where hits were to be recomputed.  Third DEs are chosen then,
not at the assignment: while a request waits for slots their reading queues would have what may
never be read.

*A request that is moved* to another DE, once its prompt is computed, counts at both DEs until the
move is over.  The other DE takes it at once or not at all, and not before requests that wait for a
DE, so that nothing that holds HBM waits for more.

*Requests without a PE* (``policy.read_side``, append at the DE).  That a DE computes the append is
decided when both engines are known, and then the PE is released; or when a DE is, while all PEs are
overloaded.  Such a request holds a DE and needs nothing else, so that it finishes and there is no
deadlock.  What its DE has evicted of the hit until the slots are granted, the DE reads.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar, assert_never

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.errors import BadRequestError, EngineLostError
from dualpath.core.modes import Handover, Mode
from dualpath.core.request import Request
from dualpath.policy.accounts import FREE_HBM, EngineLoad, GroupState, Ledger, decode_tokens
from dualpath.policy.baselines import InTurnPlacer
from dualpath.policy.decode import TwoPhaseDecodePlacer
from dualpath.policy.events import (
    DE_GIVEN,
    DE_REASONS,
    NO_EFFECTS,
    PE_APPEND,
    PE_GIVEN,
    PE_REASONS,
    UNLIMITED_TOKENS,
    Assignment,
    Charge,
    Effects,
    EngineJoined,
    EngineLost,
    EnginePaused,
    EngineReport,
    EngineResumed,
    EngineSpec,
    Event,
    Fetch,
    Finished,
    MoveBegun,
    MoveEnded,
    PrefillEnded,
    ReadsBegin,
    ReadsDone,
    SchedulerSettings,
    SetThresholds,
    SlotsGranted,
    Submitted,
)
from dualpath.policy.placement import LiveRequest, Placer
from dualpath.policy.prefill import FifoPrefillPlacer
from dualpath.policy.read_side import (
    UNLIMITED_BLOCKS,
    HitSource,
    HitSources,
    tokens_of,
    weight_tokens,
)

T = TypeVar("T")


class QueueLengths(NamedTuple):
    """Requests that wait: for a PE, for a DE (a request may be in both), and all of them."""

    prefill: int
    decode: int
    total: int


class RequestScheduler:
    """Queues, ledger and rules of one cluster; not thread-safe, one owner applies events."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._ledger = Ledger()
        self._placers = _placers(settings, self._ledger)
        self._sources = HitSources(settings, self._ledger)
        self._live: dict[str, LiveRequest] = {}
        self._submitted = self._unassigned = 0
        #: Requests that hold only a DE, and the requests that each engine has.
        self._decode_only: dict[str, LiveRequest] = {}
        self._on_engine: dict[str, dict[str, None]] = {}

    def apply(self, event: Event) -> Effects:
        """Let an event change the cluster; return what the driver has to do.

        Raises the errors that the event's class names, and then changes nothing.
        """
        match event:
            case EngineReport():
                self._ledger.report(event)
            case Fetch():
                return self._fetch(event)
            case Submitted():
                return self._submit(event.request)
            case SlotsGranted():
                return self._slots_granted(event)
            case ReadsBegin():
                if (live := self._live.get(event.request_id)) is not None:
                    self._reads_begin(live, late=event.late)
            case ReadsDone():
                if (live := self._live.get(event.request_id)) is not None:
                    self._end_reads(live)
            case PrefillEnded():
                if (live := self._live.get(event.request_id)) is not None:
                    self._end_prefill(live)
            case MoveBegun():
                self._begin_move(event)
            case MoveEnded():
                self._end_move(event)
            case Finished():
                if (live := self._live.get(event.request_id)) is not None:
                    self._finish(live, event.now_s)
            case EngineJoined():
                self._join(event.spec)
            case EngineLost():
                return self._lose(event.engine_id)
            case EnginePaused():
                self._ledger.pause(event.engine_id, paused=True)
                self._requeue_unassigned()
            case EngineResumed():
                self._requeue(self._ledger.pause(event.engine_id, paused=False).role)
            case SetThresholds():
                self._set_thresholds(event)
            case _:
                assert_never(event)
        return NO_EFFECTS

    # ------------------------------------------------------------------ state

    @property
    def recomputes(self) -> bool:
        """Whether hits may be recomputed, so that ``ReadsBegin`` is needed."""
        return self._settings.recompute_limit_s > 0

    @property
    def waiting(self) -> int:
        """Requests that are submitted and not assigned yet."""
        return self._unassigned

    def fetching_groups(
        self, rounds: int, engine_ids: Collection[str] | None = None
    ) -> Iterator[str]:
        """Yield the groups that fetch, in order (``fetch_order``), apply the fetch of each first.

        ``rounds`` counts the rounds of fetches before this one.  Groups that nothing waits for are
        left out.  With ``engine_ids`` only the accounts of these engines have changed since all
        groups have fetched: then no other group can place a request that it could not place
        before, and only their groups fetch, and those in which a request waits for its KV.
        """
        prefill, decode = (self._ledger.groups_of(role) for role in (Role.PREFILL, Role.DECODE))
        groups: Iterable[GroupState]
        if engine_ids is None:
            groups = fetch_order(prefill, decode, rounds % max(len(prefill), 1))
        else:
            names = [self._ledger.engine(engine_id).spec.group for engine_id in engine_ids]
            waits = self._placers[Role.DECODE].waits_for_kv
            names += [group.name for group in decode if waits(group.name)]
            groups = [self._ledger.groups[name] for name in dict.fromkeys(names)]
        for group in groups:
            if self._placers[group.role].may_place(group.name):
                yield group.name

    def queue_lengths(self) -> QueueLengths:
        """Return the lengths of the queues."""
        return QueueLengths(
            prefill=self._placers[Role.PREFILL].waiting(),
            decode=self._placers[Role.DECODE].waiting(),
            total=self._unassigned,
        )

    def loads(self) -> tuple[EngineLoad, ...]:
        """Return the load of every engine as the rules see it, in order of joining."""
        return self._ledger.snapshot()

    def unplaceable(self) -> list[str]:
        """Return unassigned requests that are too large for every joined DE, oldest first.

        They appear when an engine is lost or none was known at ``Submitted``, and wait for a larger
        one to join, others behind them; a live driver refuses them.  Empty while no DE has joined.
        """
        largest = self._ledger.largest_decode_hbm_tokens
        if not largest or not self._unassigned:
            return []
        return [
            request_id
            for request_id, live in self._live.items()
            if Role.DECODE not in live.engines and live.decode_tokens > largest
        ]

    def request_tokens(self, request: Request, role: Role) -> int:
        """Return the weight of a waiting request at a role, as the module defines it."""
        if role is Role.PREFILL:
            return request.prompt_tokens
        reserve = self._settings.generated_reserve_tokens
        return decode_tokens(request.prompt_tokens, request.max_new_tokens, reserve)

    # ------------------------------------------------------------------ requests

    def _submit(self, request: Request) -> Effects:
        live = LiveRequest(
            request,
            number=self._submitted,
            prefill_tokens=self.request_tokens(request, Role.PREFILL),
            decode_tokens=self.request_tokens(request, Role.DECODE),
            cached_tokens=self._sources.cached_tokens(request),
        )
        self._check(live)
        self._submitted += 1
        self._unassigned += 1
        self._live[live.request_id] = live
        if request.only_decode:
            self._place_given(live, Role.DECODE, request.preferred_decode)
            self._decode_only[live.request_id] = live
            self._placers[Role.PREFILL].add(live)
        elif not request.given_prefill:
            for placer in self._placers.values():
                placer.add(live)
        elif self._has_room(request.preferred_decode, live):
            self._place_given(live, Role.DECODE, request.preferred_decode)
            return self._assign_placed([live])
        else:
            self._placers[Role.DECODE].add(live)
        return NO_EFFECTS

    def _has_room(self, decode_engine: str, live: LiveRequest) -> bool:
        """Whether a DE can take a request now, without overtaking one that waits for a DE."""
        engine = self._ledger.engines.get(decode_engine)
        if engine is None or engine.spec.role is not Role.DECODE or engine.paused:
            return False
        waiting = self._placers[Role.DECODE].waiting()
        return not waiting and engine.account(FREE_HBM) >= live.decode_tokens

    def _place_given(self, live: LiveRequest, role: Role, engine_id: str) -> None:
        """Place a request on the engine that it came with."""
        tokens = live.prefill_tokens if role is Role.PREFILL else live.decode_tokens
        self._ledger.hold(engine_id, live.request_id, tokens)
        reasons = PE_REASONS[PE_GIVEN], DE_REASONS[DE_GIVEN]
        live.place(role, engine_id, reasons[role is Role.DECODE])
        self._on_engine[engine_id][live.request_id] = None

    def _check(self, live: LiveRequest) -> None:
        request = live.request
        if request.request_id in self._live:
            raise BadRequestError(
                f"request id {request.request_id!r} is in use by a live request; "
                "submit it under another id or cancel the first"
            )
        if request.given_prefill:
            self._check_given(request)
        prompt, hit, new = request.prompt_tokens, request.hit_tokens, request.max_new_tokens
        most_cached = max(live.cached_tokens.values(), default=0)
        if prompt < 1 or not 0 <= hit < prompt or most_cached >= prompt or new < 1:
            raise BadRequestError(
                f"request {request.request_id!r} has {prompt} prompt, {hit} hit, {most_cached} "
                f"cached and {new} new tokens; it needs at least 1 prompt token, 0 ≤ hit < prompt, "
                "cached < prompt and at least 1 new token"
            )
        largest = self._ledger.largest_decode_hbm_tokens
        if largest and live.decode_tokens > largest:
            raise BadRequestError(
                f"request {request.request_id!r} needs {live.decode_tokens} tokens of KV-cache "
                f"({prompt} of them its prompt), the largest decode engine holds {largest}; "
                "shorten the prompt or start a decode engine with more memory"
            )
        if request.only_decode and not self._has_room(request.preferred_decode, live):
            raise EngineLostError(
                f"request {request.request_id!r} needs {live.decode_tokens} tokens of KV-cache at "
                f"engine {request.preferred_decode!r}, which has no room for it now; let it "
                "compute the prompt itself, or send it again"
            )

    def _check_given(self, request: Request) -> None:
        """Raise ``EngineLostError`` if the PE that a request came with gets no requests."""
        engine = self._ledger.engines.get(request.given_prefill)
        wrong = "is not in the cluster"
        if engine is not None and engine.spec.role is not Role.PREFILL:
            wrong = "is no prefill engine"
        elif engine is not None:
            wrong = "is paused" if engine.paused else ""
        if wrong:
            raise EngineLostError(
                f"request {request.request_id!r} was sent to engine {request.given_prefill!r}, "
                f"which {wrong}; send it to another prefill engine"
            )

    def _fetch(self, fetch: Fetch) -> Effects:
        state = self._ledger.groups.get(fetch.group)
        if state is None:
            return NO_EFFECTS
        placed = self._placers[state.role].fetch(fetch.group, fetch.now_s)
        for live in placed:
            self._on_engine[live.engines[state.role]][live.request_id] = None
            if state.role is Role.PREFILL:
                self._decode_only.pop(live.request_id, None)
            elif Role.PREFILL not in live.engines and not live.request.given_prefill:
                self._decode_only[live.request_id] = live
        return self._assign_placed(placed)

    def _assign_placed(self, placed: Iterable[LiveRequest]) -> Effects:
        """Assign those requests that have all engines they need, a given PE among them."""
        assigned = []
        for live in placed:
            given = live.request.given_prefill
            if given and Role.PREFILL not in live.engines:
                self._place_given(live, Role.PREFILL, given)
            if (made := self._assign(live)) is not None:
                assigned.append(made)
        return Effects(tuple(assigned)) if assigned else NO_EFFECTS

    def _assign(self, live: LiveRequest) -> Assignment | None:
        """Charge a request to its engines and plan its reads; None while it waits for one."""
        assert live.assignment is None, f"{live.request_id} is assigned already"
        if Role.DECODE not in live.engines:
            return None
        source = None
        if Role.PREFILL in live.engines:
            source = self._sources.plan(
                live.request.hit_tokens, live.cached_tokens, live.engines, use_thirds=False
            )
        at_decode = live.cached_tokens.get(live.engines[Role.DECODE], 0)
        append = self._sources.append_at_decode(live.request, source, live.engines, at_decode)
        if append is not None:
            return self._assign_append(live, append)
        return None if source is None else self._assign_pair(live, source)

    def _assign_append(self, live: LiveRequest, source: HitSource) -> Assignment:
        """Charge a request to its DE, which computes the append, and release its PE."""
        if Role.PREFILL in live.engines:
            self._unplace(live, Role.PREFILL)
        else:
            self._placers[Role.PREFILL].discard(live.request_id)
            del self._decode_only[live.request_id]
        decode_engine = live.engines[Role.DECODE]
        handover, handover_reason = self._sources.handover(live.engines)
        self._ledger.assign(decode_engine, live.request_id)
        read_tokens = self._read_tokens(live, source)[Role.DECODE]
        if read_tokens:
            self._ledger.charge_read(decode_engine, live.request_id, read_tokens)
            live.reading = (decode_engine,)
        live.assignment = Assignment(
            request_id=live.request_id,
            prefill_engine=None,
            decode_engine=decode_engine,
            reads=source.runs,
            pe_reason=PE_REASONS[PE_APPEND],
            de_reason=live.reasons[Role.DECODE],
            read_reason=source.reason,
            decode_tokens=live.decode_tokens,
            decode_read_tokens=read_tokens,
            unstored_tokens=source.unstored_tokens,
            handover=handover,
            handover_reason=handover_reason,
        )
        self._unassigned -= 1
        self._charge_computing(live, source)
        return live.assignment

    def _assign_pair(self, live: LiveRequest, source: HitSource) -> Assignment:
        """Charge a request to both of its engines."""
        prefill_engine, decode_engine = live.engines[Role.PREFILL], live.engines[Role.DECODE]
        weight = self._recompute_weight(live, source.recompute_tokens)
        self._ledger.assign(prefill_engine, live.request_id, weight)
        self._ledger.assign(decode_engine, live.request_id)
        reads = self._read_tokens(live, source)
        live.reading = tuple(live.engines[side] for side, tokens in reads.items() if tokens)
        handover, handover_reason = self._sources.handover(live.engines)
        for side, tokens in reads.items():
            if tokens:
                self._ledger.charge_read(live.engines[side], live.request_id, tokens)
        self._sources.wait_for_slots(live, {live.engines[side]: n for side, n in reads.items()})
        live.assignment = Assignment(
            request_id=live.request_id,
            prefill_engine=prefill_engine,
            decode_engine=decode_engine,
            reads=source.runs,
            pe_reason=live.reasons[Role.PREFILL],
            de_reason=live.reasons[Role.DECODE],
            read_reason=source.reason,
            prefill_tokens=live.prefill_tokens + weight,
            decode_tokens=live.decode_tokens,
            prefill_read_tokens=reads[Role.PREFILL],
            decode_read_tokens=reads[Role.DECODE],
            recompute_tokens=source.recompute_tokens,
            unstored_tokens=source.unstored_tokens,
            handover=handover,
            handover_reason=handover_reason,
        )
        self._unassigned -= 1
        self._charge_computing(live, source)
        return live.assignment

    def _recompute_weight(self, live: LiveRequest, recompute_tokens: int) -> int:
        """Return how much more a request counts at its PE, which recomputes the end of its hit."""
        weight = self._settings.weight_of_recomputed
        return weight_tokens(live.request.hit_tokens, recompute_tokens, weight)

    def _thirds_change(self, assignment: Assignment, grant: SlotsGranted) -> bool:
        """Whether third DEs may serve reads from now on, or do not serve what is planned."""
        if assignment.thirds:
            reads = any(third.read_tokens for third in assignment.thirds)
            return not grant.use_thirds or (reads and not grant.third_reads)
        may_serve = self._settings.third_engine_reads and grant.use_thirds and grant.third_reads
        return bool(may_serve and any(not run.cached for run in assignment.reads))

    def _charge_thirds(self, live: LiveRequest, source: HitSource) -> tuple[Charge, ...]:
        """Charge third DEs what they read of a hit, and return it; 0 for what is in their DRAM."""
        reads: dict[str, int] = {}
        for run in source.runs:
            if run.third:
                tokens = 0 if run.cached else run.blocks.count * self._settings.block_tokens
                reads[run.third] = reads.get(run.third, 0) + tokens
        for engine_id, tokens in reads.items():
            self._on_engine[engine_id][live.request_id] = None
            if tokens:
                self._ledger.charge_read(engine_id, live.request_id, tokens)
                live.reading += (engine_id,)
        return tuple(Charge(engine_id, 0, tokens) for engine_id, tokens in reads.items())

    def _release_thirds(self, live: LiveRequest) -> None:
        """Third DEs serve a request no longer."""
        if live.assignment is not None:
            for third in live.assignment.thirds:
                self._on_engine.get(third.engine_id, {}).pop(live.request_id, None)

    def _slots_granted(self, grant: SlotsGranted) -> Effects:
        live = self._live.get(grant.request_id)
        if live is None or live.assignment is None or live.prefilled:
            return NO_EFFECTS
        self._sources.reads_over(live)
        effects = self._plan_again(live, live.assignment, grant)
        self._sources.reads_begin(live)
        return effects

    def _plan_again(
        self, live: LiveRequest, assignment: Assignment, grant: SlotsGranted
    ) -> Effects:
        """Plan a request's reads again if they differ from what was known at its assignment."""
        cached = {Role.PREFILL: grant.prefill_blocks, Role.DECODE: grant.decode_blocks}
        found = all(cached[side] >= assignment.cached_end(side) for side in Role)
        again = assignment.recompute_tokens or self._thirds_change(assignment, grant)
        if found and not again:
            return NO_EFFECTS
        if assignment.prefill_engine is None:
            return Effects((self._read_at_decode(live, assignment, cached[Role.DECODE]),))
        return Effects((self._replan(live, assignment, cached, grant),))

    def _reads_begin(self, live: LiveRequest, *, late: bool) -> None:
        if live.assignment is None or live.assignment.prefill_engine is None or live.prefilled:
            return
        self._sources.reads_over(live)
        if late:
            charges = map(live.assignment.at, Role)
            self._sources.wait_for_slots(live, {c.engine_id: c.read_tokens for c in charges})
        else:
            self._sources.reads_begin(live)

    def _read_at_decode(self, live: LiveRequest, old: Assignment, cached_blocks: int) -> Assignment:
        """Let the DE of a request without a PE read what it has evicted of the stored hit."""
        hit_tokens, block_tokens = live.request.hit_tokens, self._settings.block_tokens
        cached = tokens_of(cached_blocks, hit_tokens, block_tokens)
        source = self._sources.at_decode(hit_tokens, min(cached, hit_tokens + old.unstored_tokens))
        read_tokens = self._read_tokens(live, source)[Role.DECODE]
        more_tokens = read_tokens - old.decode_read_tokens
        self._ledger.change(old.decode_engine, old.request_id, 0, more_tokens)
        live.reading = (old.decode_engine,)
        live.assignment = msgspec.structs.replace(
            old,
            reads=source.runs,
            read_reason=source.reason,
            decode_read_tokens=read_tokens,
            unstored_tokens=source.unstored_tokens,
        )
        self._charge_computing(live, source)
        return live.assignment

    def _replan(
        self,
        live: LiveRequest,
        old: Assignment,
        cached_blocks: Mapping[Role, int],
        grant: SlotsGranted,
    ) -> Assignment:
        """Plan an assigned request's reads again; its engines cache ``cached_blocks`` of it."""
        for side in Role:
            read_tokens = old.at(side).read_tokens
            self._ledger.change(live.engines[side], old.request_id, 0, -read_tokens)
        for third in old.thirds:
            self._ledger.change_read(third.engine_id, old.request_id, -third.read_tokens)
        self._release_thirds(live)
        self._set_computing(live, 0)
        hit_tokens = live.request.hit_tokens
        most_tokens, block_tokens = hit_tokens + old.unstored_tokens, self._settings.block_tokens
        in_hbm = old.handover is Handover.HBM
        slots = old.blocks_at(Role.DECODE) if in_hbm else UNLIMITED_BLOCKS
        found = {**cached_blocks, Role.DECODE: min(cached_blocks[Role.DECODE], slots)}
        cached_tokens = {
            engine: min(tokens_of(found[side], hit_tokens, block_tokens), most_tokens)
            for side, engine in live.engines.items()
        }
        for prefix in grant.others:
            tokens = tokens_of(prefix.blocks, hit_tokens, block_tokens)
            cached_tokens.setdefault(prefix.engine_id, min(tokens, hit_tokens))
        source = self._sources.plan(
            *(hit_tokens, cached_tokens, live.engines, slots),
            use_thirds=grant.use_thirds,
            third_reads=grant.third_reads,
        )
        before = self._recompute_weight(live, old.recompute_tokens)
        more = self._recompute_weight(live, source.recompute_tokens) - before
        reads = self._read_tokens(live, source)
        new = msgspec.structs.replace(
            old,
            reads=source.runs,
            read_reason=source.reason,
            prefill_tokens=old.prefill_tokens + more,
            prefill_read_tokens=reads[Role.PREFILL],
            decode_read_tokens=reads[Role.DECODE],
            recompute_tokens=source.recompute_tokens,
            unstored_tokens=source.unstored_tokens,
        )
        for side in Role:
            more_tokens = new.at(side).tokens - old.at(side).tokens
            self._ledger.change(live.engines[side], old.request_id, more_tokens, reads[side])
        live.reading = new.engines
        new = msgspec.structs.replace(new, thirds=self._charge_thirds(live, source))
        live.assignment = new
        self._charge_computing(live, source)
        return new

    def _read_tokens(self, live: LiveRequest, source: HitSource) -> dict[Role, int]:
        """Return the tokens that are read from storage at either side."""
        hit_tokens = live.request.hit_tokens + source.unstored_tokens - source.recompute_tokens
        tokens = dict.fromkeys(Role, 0)
        for run in source.runs:
            if not run.cached and not run.third:
                tokens[run.side] = run.tokens(self._settings.block_tokens, hit_tokens)
        return tokens

    def _charge_computing(self, live: LiveRequest, source: HitSource) -> None:
        """Charge a request's misses, and hits that are recomputed, to the engine that computes."""
        hit_tokens = live.request.hit_tokens + source.unstored_tokens - source.recompute_tokens
        self._set_computing(live, live.request.prompt_tokens - hit_tokens)

    def _set_computing(self, live: LiveRequest, tokens: int) -> None:
        """Charge so many tokens to compute to a request's PE, or to its DE if it has no PE."""
        engine = live.engines.get(Role.PREFILL)
        if engine is None and live.assignment is not None:
            engine = live.assignment.decode_engine
        if engine is not None:
            self._sources.set_computing(live, engine, tokens)

    def _end_reads(self, live: LiveRequest) -> None:
        """Release the reads that are uncounted."""
        for engine_id in live.reading:
            self._ledger.release_read(engine_id, live.request_id)
        live.reading = ()
        self._sources.reads_over(live)

    def _end_prefill(self, live: LiveRequest) -> None:
        if live.assignment is not None and not live.prefilled:
            live.prefilled = True
            self._set_computing(live, 0)
            self._release_thirds(live)
            if live.assignment.prefill_engine is not None:
                self._release(live, Role.PREFILL)

    def _begin_move(self, event: MoveBegun) -> None:
        """Charge a request to the DE that fetches its KV, as an assignment does."""
        live, engine_id = self._live.get(event.request_id), event.decode_engine
        if live is None or not live.prefilled or live.moving_to:
            raise EngineLostError(
                f"request {event.request_id!r} has no computed prompt, or its KV is being moved; "
                "send it again"
            )
        if engine_id == live.engines[Role.DECODE] or not self._has_room(engine_id, live):
            raise EngineLostError(
                f"engine {engine_id!r} has no room now for {live.decode_tokens} tokens of KV-cache "
                "more, or gets no requests"
            )
        self._ledger.hold(engine_id, live.request_id, live.decode_tokens)
        self._ledger.assign(engine_id, live.request_id)
        self._on_engine[engine_id][live.request_id] = None
        live.moving_to = engine_id

    def _end_move(self, event: MoveEnded) -> None:
        """Release a moved request at its former DE, or one that was not moved at the other one."""
        live = self._live.get(event.request_id)
        if live is None or not live.moving_to:
            return
        if event.moved:
            self._note_stay(live, event.now_s)
            assert live.assignment is not None, "its prompt is computed"
            former, live.engines[Role.DECODE] = live.engines[Role.DECODE], live.moving_to
            live.assignment = msgspec.structs.replace(
                live.assignment, decode_engine=live.moving_to, de_reason=DE_REASONS[DE_GIVEN]
            )
            live.decode_since_s, live.moving_to = event.now_s, former
        self._release_move(live)

    def _release_move(self, live: LiveRequest) -> None:
        """Release a request at the DE that it is moved to, or at the one that it has left."""
        if live.moving_to:
            self._release_at(live.moving_to, live.request_id)
            live.moving_to = ""

    def _finish(self, live: LiveRequest, now_s: float) -> None:
        """Remove a request that has ended, and take down how long it had its DE."""
        self._note_stay(live, now_s)
        self._remove(live)

    def _note_stay(self, live: LiveRequest, now_s: float) -> None:
        if live.assignment is not None and live.decode_since_s is not None:
            decode = self._ledger.engines[live.assignment.decode_engine]
            decode.stayed(max(now_s - live.decode_since_s, 0.0))

    def _remove(self, live: LiveRequest) -> None:
        """Remove a request in whatever state, with everything on its account."""
        del self._live[live.request_id]
        self._decode_only.pop(live.request_id, None)
        if live.assignment is None:
            self._unassigned -= 1
            assert self._unassigned >= 0, "requests that wait are counted once"
            for placer in self._placers.values():
                placer.discard(live.request_id)
        self._end_reads(live)
        self._release_thirds(live)
        self._set_computing(live, 0)
        self._release_move(live)
        for role in live.engines:
            self._release(live, role)

    def _release(self, live: LiveRequest, role: Role) -> None:
        """Release a request at its engine of a role."""
        self._release_at(live.engines[role], live.request_id)

    def _release_at(self, engine_id: str, request_id: str) -> None:
        """Release a request at an engine, which may be lost by now."""
        self._ledger.release(engine_id, request_id)
        self._on_engine.get(engine_id, {}).pop(request_id, None)

    # ------------------------------------------------------------------ engines

    def _join(self, spec: EngineSpec) -> None:
        self._ledger.join(spec)
        self._on_engine[spec.engine_id] = {}
        self._requeue(spec.role)

    def _lose(self, engine_id: str) -> Effects:
        spec = self._ledger.leave(engine_id)
        here = [self._live[request_id] for request_id in self._on_engine.pop(engine_id)]
        prefill = spec.role is Role.PREFILL
        lost = [
            live
            for live in here
            if prefill
            or live.assignment
            or Role.PREFILL in live.engines
            or live.request.only_decode
        ]
        lost += [
            live
            for live in self._live.values()
            if live.assignment is None and live.request.given_prefill == engine_id
        ]
        for live in lost:
            self._remove(live)
        self._requeue(spec.role)
        lost.sort(key=lambda live: live.number)
        return Effects(lost_requests=tuple(live.request_id for live in lost))

    def _requeue(self, role: Role) -> None:
        """Queue waiting requests of a role again after its engines changed."""
        requests = []
        if role is Role.DECODE:
            for live in list(self._decode_only.values()):
                if not live.request.only_decode:
                    self._unplace(live, Role.DECODE)
                    requests.append(live)
                    del self._decode_only[live.request_id]
        self._placers[role].requeue(requests)

    def _requeue_unassigned(self) -> None:
        """Queue all waiting requests again for both of their engines."""
        requests = []
        for live in self._live.values():
            if Role.PREFILL in live.engines and live.assignment is None:
                self._unplace(live, Role.PREFILL)
                requests.append(live)
        self._placers[Role.PREFILL].requeue(requests)
        self._requeue(Role.DECODE)

    def _unplace(self, live: LiveRequest, role: Role) -> None:
        assert live.assignment is None, f"{live.request_id} is assigned and stays where it is"
        self._release(live, role)
        del live.engines[role], live.reasons[role]

    def _set_thresholds(self, thresholds: SetThresholds) -> None:
        self._settings = msgspec.structs.replace(
            self._settings,
            alpha_tokens=thresholds.alpha_tokens,
            beta_tokens=thresholds.beta_tokens,
            computed_weight=thresholds.computed_weight,
            recompute_weight=thresholds.recompute_weight,
        )
        self._sources.settings = self._settings
        alpha_tokens = effective_alpha_tokens(self._settings)
        for placer in self._placers.values():
            placer.set_thresholds(alpha_tokens, thresholds.beta_tokens)


def fetch_order(prefill: Sequence[T], decode: Sequence[T], first: int) -> list[T]:
    """Return groups in the order in which they fetch (§6.1): PE groups in turn, then DE groups.

    ``first`` (0 to the number of PE groups - 1) is the PE group that begins.  Another one begins in
    each round of fetches, or the first group would get all requests while it is below β.
    """
    return [*prefill[first:], *prefill[:first], *decode]


def places_in_turn(settings: SchedulerSettings) -> bool:
    """Return whether engines get requests in turn (``baselines``), not by §6.1."""
    by_load = settings.mode in (Mode.DUALPATH, Mode.SPLIT, Mode.ORACLE)
    return not by_load and not _balanced_baseline(settings)


def effective_alpha_tokens(settings: SchedulerSettings) -> int:
    """Return α; a baseline placed by load does not look at reading queues."""
    return UNLIMITED_TOKENS if _balanced_baseline(settings) else settings.alpha_tokens


def _balanced_baseline(settings: SchedulerSettings) -> bool:
    return settings.balanced_baselines and not settings.mode.dual_path


def _placers(settings: SchedulerSettings, ledger: Ledger) -> dict[Role, Placer]:
    """Return the placement rules of a mode."""
    if places_in_turn(settings):
        return {role: InTurnPlacer(ledger, role) for role in Role}
    alpha_tokens = effective_alpha_tokens(settings)
    return {
        Role.PREFILL: FifoPrefillPlacer(ledger, alpha_tokens, settings.beta_tokens),
        Role.DECODE: TwoPhaseDecodePlacer(
            ledger,
            settings.threshold_factor,
            alpha_tokens,
            split_reads=settings.mode is Mode.SPLIT,
        ),
    }
