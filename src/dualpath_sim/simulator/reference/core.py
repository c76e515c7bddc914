"""The reference core: the life of a round, stage by stage as in ``docs/simulator.md``."""

import functools
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from dualpath.core.blocks import holding_blocks
from dualpath.core.cluster import Role
from dualpath.core.modes import Handover, Mode
from dualpath.plan.counts import chunk_blocks, kv_tokens, new_full_blocks
from dualpath.policy.events import Assignment
from dualpath.workload.columns.agent_table import AgentTable
from dualpath_sim.simulator.derived import (
    FILL_PATH,
    LOAD_DE_PATH,
    LOAD_PE_PATH,
    PERSIST_GENERATED_PATH,
    PERSIST_PROMPT_PATH,
    RELOAD_FROM_HBM_PATH,
    RELOAD_PATH,
    SEND_PATH,
    SEND_TO_HBM_PATH,
    STAGE_PATH,
    cluster_layout,
    layer_kinds,
    limits,
    scheduler_settings,
)
from dualpath_sim.simulator.reference.driver import SchedulerDriver
from dualpath_sim.simulator.reference.machine import EventQueue, Reservation, SimulatedMachine
from dualpath_sim.simulator.reference.rebalancing import Rebalancing
from dualpath_sim.simulator.reference.record import NO_ENGINE, Record
from dualpath_sim.simulator.reference.units import Chunk, Pass, PrefillUnit, PrefillWork, Units
from dualpath_sim.simulator.result import Progress, SimulationResult
from dualpath_sim.simulator.rules import (
    LayerKinds,
    fill_bytes,
    fill_hit_bytes,
    load_bytes,
    pass_end_ns,
    read_bytes,
    send_bytes,
    to_ns,
    whole_at_decode,
    whole_at_prefill,
)
from dualpath_sim.simulator.settings import Setup


class ThirdSource(NamedTuple):
    """What a third DE serves of a hit: blocks from ``first`` on, the first ``cached`` in its DRAM.

    It reads ``read_tokens`` from storage.
    """

    engine: int
    first: int
    blocks: int
    cached: int
    read_tokens: int


def _third_sources(assignment: Assignment) -> list[ThirdSource]:
    """Return what each third DE serves; its runs follow each other."""
    sources = []
    for third in assignment.thirds:
        runs = [run for run in assignment.reads if run.third == third.engine_id]
        blocks = sum(run.blocks.count for run in runs)
        cached = sum(run.blocks.count for run in runs if run.cached)
        assert runs[-1].blocks.end == runs[0].blocks.first + blocks, "its blocks have no gap"
        sources.append(
            ThirdSource(
                int(third.engine_id), runs[0].blocks.first, blocks, cached, third.read_tokens
            )
        )
    return sources


class Flight:
    """A round from its assignment on; ``parts_left`` of its reads are not over yet.

    With ``appends`` its DE computes what is no hit: its buffer holds the hit alone, in place of the
    prompt.  With ``in_hbm`` the PE sends into the DE's HBM: the DE's buffer has ``slots`` for the
    hits that it reads or caches, and these are copied into HBM until ``filled_ns``.  By side:
    ``cached_tokens`` are those that the scheduler expected in the side's buffer, ``read_tokens``
    those that the side reads, which are more where the buffer has evicted some.

    The PE sends ``pe_blocks`` of the hit from ``pe_first`` on.  ``thirds`` serve some of them; its
    own buffer has ``own_blocks`` from ``own_first`` on, whose cached ones may be before those of
    the thirds (``gap``).
    """

    __slots__ = (
        *("_block_tokens", "_hit_tokens", "_kinds", "_prompt_tokens", "appends", "assignment"),
        "de",
        *("de_blocks", "cached_tokens", "parts_left", "pe", "pe_blocks", "pe_first", "read_tokens"),
        *("filled_ns", "gap", "in_hbm", "own_blocks", "own_first", "slots", "thirds"),
    )

    def __init__(
        self,
        assignment: Assignment,
        hit_tokens: int,
        prompt_tokens: int,
        kinds: LayerKinds,
        block_tokens: int,
    ) -> None:
        self.assignment = assignment
        self.appends = assignment.prefill_engine is None
        self.pe = NO_ENGINE if assignment.prefill_engine is None else int(assignment.prefill_engine)
        self.de = int(assignment.decode_engine)
        self._hit_tokens = hit_tokens
        self._prompt_tokens = hit_tokens if self.appends else prompt_tokens
        self._kinds, self._block_tokens = kinds, block_tokens
        self.pe_first = self.pe_blocks = self.de_blocks = 0
        self.cached_tokens = dict.fromkeys(Role, 0)
        self.thirds = _third_sources(assignment)
        self.own_first = self.own_blocks = 0
        for run in assignment.reads:
            if run.is_at(Role.PREFILL):
                self.own_first = run.blocks.first if not self.own_blocks else self.own_first
                self.own_blocks += run.blocks.count
            if run.cached and not run.third:
                self.cached_tokens[run.side] += run.tokens(block_tokens, hit_tokens)
            if run.side is Role.DECODE:
                self.de_blocks += run.blocks.count
            else:
                # A run that is read follows a cached one.
                self.pe_first = run.blocks.first if not self.pe_blocks else self.pe_first
                self.pe_blocks += run.blocks.count
        self.read_tokens = {
            Role.PREFILL: assignment.prefill_read_tokens,
            Role.DECODE: assignment.decode_read_tokens,
        }
        self.gap = self.pe_blocks > self.own_blocks > 0 and self.own_first == self.pe_first
        self.parts_left = 0
        self.in_hbm = assignment.handover is Handover.HBM
        self.filled_ns = 0
        #: Of the DE's buffer: for the whole prompt, or the hit if the DE computes the append.
        self.slots = holding_blocks(self._prompt_tokens, self._block_tokens)
        if self.in_hbm:
            self.slots = self.de_blocks

    @property
    def _hit_blocks(self) -> int:
        return holding_blocks(self._hit_tokens, self._block_tokens)

    def engine(self, side: Role) -> int:
        """Return the engine of a side."""
        return self.pe if side is Role.PREFILL else self.de

    def _found_blocks(self, side: Role) -> int:
        """Return how many blocks a side's buffer had cached when granted; it reads the others."""
        blocks = self.own_blocks if side is Role.PREFILL else self.de_blocks
        return blocks - holding_blocks(self.read_tokens[side], self._block_tokens)

    def read_bytes(self, side: Role) -> float:
        """Return the bytes that a side reads from storage."""
        at_decode = side is Role.DECODE
        return read_bytes(
            self._kinds,
            at_decode,
            self._found_blocks(side),
            self.pe_first,
            self.pe_blocks if at_decode else self.own_blocks,
            self._hit_blocks,
            self._block_tokens,
        )

    def load_bytes(self, chunk: Chunk, *, resident: bool) -> tuple[float, float, float]:
        """Return the bytes loaded before a chunk: hits at the PE, at the DE, earlier chunks."""
        return load_bytes(
            self._kinds,
            chunk.cached // self._block_tokens,
            self.pe_first,
            self.pe_blocks,
            self._hit_blocks,
            self._block_tokens,
            resident,
        )

    def send_bytes(self, chunk: Chunk) -> float:
        """Return the bytes sent to the DE after a chunk."""
        return send_bytes(
            self._kinds,
            chunk_blocks(chunk.cached, chunk.bsz, self._block_tokens),
            chunk.cached // self._block_tokens,
            self.pe_first,
            self.pe_blocks,
            self._hit_blocks,
            self._prompt_tokens,
            self._block_tokens,
        )

    def fill_bytes(self) -> float:
        """Return the bytes that are copied from the DE's buffer into its HBM."""
        if self.in_hbm:
            return fill_hit_bytes(
                self._kinds,
                self.pe_first,
                self.pe_blocks,
                self._hit_blocks,
                self._prompt_tokens,
                self._block_tokens,
            )
        return fill_bytes(self._kinds, self._prompt_tokens, self._block_tokens)

    def whole_at_prefill(self) -> int:
        """Return how many blocks, from the first of the PE's run on, its buffer may cache."""
        cached_blocks = holding_blocks(self.cached_tokens[Role.PREFILL], self._block_tokens)
        return whole_at_prefill(
            self._kinds,
            self._found_blocks(Role.PREFILL),
            self.own_first,
            cached_blocks if self.gap else self.own_blocks,
            self._hit_tokens,
            self._block_tokens,
        )

    def whole_at_decode(self) -> int:
        """Return how many blocks, from the first of the prompt on, the DE's buffer may cache."""
        return whole_at_decode(
            self._kinds,
            self._found_blocks(Role.DECODE),
            self.pe_first,
            self.pe_blocks,
            self._hit_tokens,
            self._prompt_tokens,
            self._block_tokens,
        )


#: ``progress`` is called once in so many events.
PROGRESS_EVENTS = 20_000


class ReferenceCore:
    """One run of the simulator."""

    def __init__(
        self, setup: Setup, agents: AgentTable, *, record_decisions: bool, window_ns: int
    ) -> None:
        self._setup = setup
        self._agents = agents
        cluster = setup.cluster
        self._limits = limits(setup)
        self._block_tokens = cluster.block_tokens
        self._kinds = layer_kinds(setup)
        self._oracle = setup.mode is Mode.ORACLE
        settings = scheduler_settings(setup, self._limits)
        self._thirds_serve = settings.third_engine_reads > 0
        self._recomputes = settings.recompute_limit_s > 0
        self._resident = not setup.mode.layerwise
        self._layers = setup.model.layers
        self._overlap_passes = cluster.overlap_passes
        self._overhead_ns = to_ns(cluster.request_overhead_s)
        self._admission_ns = to_ns(cluster.decode_admission_s)
        self._events = EventQueue()
        self._record = Record(agents, record_decisions)
        self._machine = SimulatedMachine(setup, self._limits, self._events, window_ns)
        self._window_ns = window_ns
        layout = cluster_layout(cluster)
        self._driver = SchedulerDriver(
            setup, self._limits, layout, agents, self._events, self._assigned
        )
        units = Units(setup, self._limits, layout, self._events, self._finished)
        self._prefill_units, self._prefill_unit_of = units.prefill, units.prefill_of
        self._decode_units, self._decode_unit_of = units.decode, units.decode_of
        if cluster.rebalancing is not None:
            Rebalancing(
                cluster.rebalancing,
                setup,
                self._limits,
                agents,
                self._events,
                self._record,
                self._driver,
                self._machine,
                units,
            )
        #: By DE, the appends that it computes.
        self._appends: dict[int, PrefillUnit] = {}
        self._tier_hit_tokens = 0
        self._read_columns()

    def _read_columns(self) -> None:
        """Copy the columns of the agent table to lists, which Python reads faster than arrays."""
        agents = self._agents
        self._prompt = agents.prompt_tokens.tolist()
        self._hit = agents.hit_tokens.tolist()
        self._generated = agents.generated_tokens.tolist()
        self._delay_ns = [to_ns(delay) for delay in agents.delay_s.tolist()]
        self._agent_of: list[int] = []
        self._last_round: list[int] = []
        starts = agents.first_round.tolist()
        for agent, (first, end) in enumerate(pairwise(starts)):
            self._agent_of += [agent] * (end - first)
            self._last_round.append(end - 1)
        self._stored_ns = [0] * agents.agents
        self._flights: dict[int, Flight] = {}
        self._children: dict[int, list[int]] = defaultdict(list)

    def run(self, until_ns: int | None, progress: Progress | None) -> SimulationResult:
        """Run until no event is left, or none up to ``until_ns``."""
        first_round = self._agents.first_round.tolist()
        parents = self._agents.start_after_round.tolist()
        for agent, start_s in enumerate(self._agents.start_s.tolist()):
            if parents[agent] >= 0:
                self._children[parents[agent]].append(agent)
            else:
                round_index = first_round[agent]
                start_ns = to_ns(start_s) + self._delay_ns[round_index]
                self._events.at(start_ns, self._submit, round_index)
        events, stopped = self._events, False
        while not stopped and events.next_ns() is not None:
            stopped = not events.run(until_ns, PROGRESS_EVENTS)
            if progress is not None and not stopped and events.handled % PROGRESS_EVENTS == 0:
                progress(self._record.finished, self._agents.rounds, events.now_ns / 1e9)
        return self._record.result(
            self._setup,
            self._machine,
            self._window_ns,
            end_ns=events.now_ns,
            stopped=stopped,
            events=events.handled,
            dram_tier_hit_tokens=self._tier_hit_tokens,
        )

    # 1. Submit.

    def _submit(self, r: int) -> None:
        self._record.submitted_ns[r] = self._events.now_ns
        if self._overhead_ns:
            self._events.at(self._events.now_ns + self._overhead_ns, self._arrive, r)
        else:
            self._arrive(r)

    def _arrive(self, r: int) -> None:
        self._driver.submit(r, self._machine.cached_blocks(self._agent_of[r]))

    # 2. Fetch, then 3. buffers.

    def _assigned(self, r: int, assignment: Assignment) -> None:
        self._hit[r] -= assignment.recompute_tokens
        hit, prompt = self._hit[r], self._prompt[r]
        flight = Flight(assignment, hit, prompt, self._kinds, self._block_tokens)
        self._flights[r], cached = flight, flight.cached_tokens
        self._record.assigned(r, assignment, cached, self._events.now_ns)
        if self._oracle:
            self._record.granted_ns[r] = self._events.now_ns
            self._loaded(r)
            return
        if flight.in_hbm:
            self._driver.hbm_allocated(assignment)
        cached_blocks = holding_blocks(cached[Role.DECODE], self._block_tokens)
        self._machine.buffer(flight.de).reserve(
            Reservation(self._agent_of[r], 0, flight.slots, cached_blocks),
            lambda adopted: self._de_buffer_granted(r, flight, adopted),
        )

    def _de_buffer_granted(self, r: int, flight: Flight, adopted_blocks: int) -> None:
        self._adopted(flight, Role.DECODE, adopted_blocks)
        if any(flight.cached_tokens.values()) or self._thirds_serve or self._recomputes:
            flight = self._replanned(r, flight, adopted_blocks)
        flight = self._thirds_reserved(r, flight, adopted_blocks)
        if flight.own_blocks:
            cached_blocks = holding_blocks(flight.cached_tokens[Role.PREFILL], self._block_tokens)
            self._machine.buffer(flight.pe).reserve(
                Reservation(self._agent_of[r], flight.own_first, flight.own_blocks, cached_blocks),
                lambda adopted: self._pe_buffer_granted(r, flight, adopted),
            )
        else:
            self._granted(r, flight)

    def _pe_buffer_granted(self, r: int, flight: Flight, adopted_blocks: int) -> None:
        if evicted := self._adopted(flight, Role.PREFILL, adopted_blocks):
            flight.read_tokens[Role.PREFILL] += evicted
            self._driver.read_more(flight.pe, evicted)
        self._granted(r, flight)

    def _adopted(self, flight: Flight, side: Role, blocks: int) -> int:
        """Count a side's hits in DRAM; return how many of the expected tokens it has evicted."""
        expected = flight.cached_tokens[side]
        found = min(blocks * self._block_tokens, expected)
        self._tier_hit_tokens += found
        return expected - found

    def _thirds_reserved(self, r: int, flight: Flight, at_decode: int) -> Flight:
        """Reserve slots of third DEs; return the flight, re-planned if some grant none.

        Without reads by third DEs then, and if that is not enough without third DEs.
        """
        if not self._reserve_at_thirds(r, flight):
            flight = self._replanned(r, flight, at_decode, third_reads=False)
            if not self._reserve_at_thirds(r, flight):
                return self._replanned(r, flight, at_decode, use_thirds=False)
        for third in flight.thirds:
            self._tier_hit_tokens += third.cached * self._block_tokens
        return flight

    def _reserve_at_thirds(self, r: int, flight: Flight) -> bool:
        """Reserve slots of all third DEs, or of none if one has no room or has evicted blocks."""
        agent = self._agent_of[r]
        prompt_blocks = holding_blocks(self._prompt[r], self._block_tokens)
        for position, third in enumerate(flight.thirds):
            wanted = Reservation(agent, third.first, third.blocks, third.cached)
            if not self._machine.buffer(third.engine).reserve_at_third(wanted, prompt_blocks):
                self._release_thirds(agent, flight.thirds[:position])
                return False
        return True

    def _release_thirds(self, agent: int, thirds: Sequence[ThirdSource]) -> None:
        """Free slots of third DEs, which cache again what they had in DRAM, and no other block."""
        for third in thirds:
            buffer = self._machine.buffer(third.engine)
            buffer.release(agent, third.first, third.blocks, third.cached)

    def _replanned(
        self,
        r: int,
        flight: Flight,
        at_decode: int,
        *,
        third_reads: bool = True,
        use_thirds: bool = True,
    ) -> Flight:
        """Return a round's flight, re-planned if its engines cache less than was expected."""
        at_prefill = 0
        if not flight.appends:
            at_prefill = self._machine.buffer(flight.pe).cached.of(self._agent_of[r])
        cached_blocks = {Role.PREFILL: at_prefill, Role.DECODE: at_decode}
        others = self._machine.cached_blocks(self._agent_of[r]) if self._thirds_serve else {}
        changed = self._driver.granted(
            *(flight.assignment, cached_blocks, others),
            third_reads=third_reads,
            use_thirds=use_thirds,
        )
        if changed is flight.assignment:
            return flight
        self._hit[r] -= changed.recompute_tokens - flight.assignment.recompute_tokens
        replanned = Flight(changed, self._hit[r], self._prompt[r], self._kinds, self._block_tokens)
        replanned.slots = flight.slots
        self._flights[r] = replanned
        return replanned

    # 4. Read.

    def _granted(self, r: int, flight: Flight) -> None:
        now_ns = self._events.now_ns
        self._record.granted_ns[r] = now_ns
        sides = [side for side in Role if flight.read_tokens[side]]
        reading = [third for third in flight.thirds if third.read_tokens]
        flight.parts_left = len(sides) + len(reading)
        if not flight.parts_left:
            self._loaded(r)
            return
        starts_ns = max(self._stored_ns[self._agent_of[r]], now_ns)
        starts = [functools.partial(self._read, r, flight, side) for side in sides]
        starts += [functools.partial(self._read_at_third, r, flight, third) for third in reading]
        for start in starts:
            if starts_ns > now_ns:
                self._events.at(starts_ns, start)
            else:
                start()

    def _read(self, r: int, flight: Flight, side: Role) -> None:
        engine, tokens = flight.engine(side), flight.read_tokens[side]
        part_bytes = flight.read_bytes(side)
        self._machine.charge_read(engine, side, part_bytes)
        self._machine.snic(engine).read(
            part_bytes,
            lambda: self._part_read(r, flight, engine, tokens),
        )

    def _read_at_third(self, r: int, flight: Flight, third: ThirdSource) -> None:
        engine, part_bytes = third.engine, (third.blocks - third.cached) * self._limits.block_bytes
        self._machine.charge_read(engine, Role.DECODE, part_bytes)
        self._machine.snic(engine).read(
            part_bytes, lambda: self._part_read(r, flight, engine, third.read_tokens)
        )

    def _part_read(self, r: int, flight: Flight, engine: int, tokens: int) -> None:
        self._driver.part_read(engine, tokens)
        flight.parts_left -= 1
        if flight.parts_left == 0:
            self._loaded(r)

    # 5. Prefill.

    def _loaded(self, r: int) -> None:
        self._record.loaded_ns[r] = self._events.now_ns
        flight = self._flights[r]
        self._driver.read_done(r, flight.assignment)
        if flight.appends:
            self._fill_hit(r, flight)
            return
        if flight.in_hbm:
            # The PE loads them from the buffer meanwhile.
            de, filled_bytes = flight.de, flight.fill_bytes()
            flight.filled_ns = self._machine.charge(FILL_PATH, de, de, filled_bytes)
        unit = self._prefill_units[self._prefill_unit_of[flight.pe]]
        unit.add(flight.pe, PrefillWork(r, self._hit[r], self._prompt[r]))
        if not unit.busy:
            # After all other events of this moment, so that rounds that become ready together
            # enter the same pass.
            unit.busy = True
            row = self._prefill_unit_of[flight.pe]
            self._events.at(self._events.now_ns, self._start_pass, row)

    def _start_pass(self, row: int, *, follows: bool = False) -> None:
        unit = self._prefill_units[row]
        formed = unit.form_pass()
        unit.busy = formed is not None
        if formed is None:
            return
        now_ns = self._events.now_ns
        for chunk in formed.chunks:
            if chunk.cached == chunk.work.hit_tokens:
                self._record.prefill_ns[chunk.work.round] = now_ns
        end_ns = self._pass_end(formed, overlapped=follows and self._overlap_passes)
        self._record.batch(row, formed, now_ns, end_ns)
        self._events.at(end_ns, self._computed, row, formed)

    # 6. The pass.

    def _pass_end(self, formed: Pass, *, overlapped: bool) -> int:
        now_ns = self._events.now_ns
        compute_ns = to_ns(formed.compute_s)
        if self._oracle:
            return now_ns + compute_ns
        moved_ns = max(self._load(chunk) for chunk in formed.chunks)
        if not self._resident:
            moved_ns = max(moved_ns, self._send(formed))
        return pass_end_ns(now_ns, compute_ns, moved_ns, self._layers, self._resident, overlapped)

    def _load(self, chunk: Chunk) -> int:
        flight, charge = self._flights[chunk.work.round], self._machine.charge
        pe, de = flight.pe, flight.de
        at_pe, at_de, reloaded = flight.load_bytes(chunk, resident=self._resident)
        reload_path = RELOAD_FROM_HBM_PATH if flight.in_hbm else RELOAD_PATH
        # The links of a load from a third DE are those of a load from the DE, at the third.
        at_thirds = [
            charge(LOAD_DE_PATH, pe, third.engine, at_pe * third.blocks / flight.pe_blocks)
            for third in flight.thirds
        ]
        if flight.thirds:
            at_pe *= flight.own_blocks / flight.pe_blocks
        return max(
            *at_thirds,
            charge(LOAD_PE_PATH, pe, de, at_pe),
            charge(LOAD_DE_PATH, pe, de, at_de),
            charge(reload_path, pe, de, reloaded),
        )

    def _send(self, formed: Pass) -> int:
        end_ns = self._events.now_ns
        for chunk in formed.chunks:
            flight = self._flights[chunk.work.round]
            sent_bytes = flight.send_bytes(chunk)
            path = SEND_TO_HBM_PATH if flight.in_hbm else SEND_PATH
            sent_ns = self._machine.charge(path, flight.pe, flight.de, sent_bytes)
            end_ns = max(end_ns, sent_ns)
        return end_ns

    # 7. First token.

    def _computed(self, row: int, formed: Pass) -> None:
        now_ns = self._events.now_ns
        unit = self._prefill_units[row]
        for chunk in formed.chunks:
            work = chunk.work
            work.done_tokens += chunk.bsz
            if work.done_tokens == work.prompt_tokens:
                unit.queues[chunk.engine - unit.first].popleft()
                self._record.first_token_ns[work.round] = now_ns
        sent_ns = self._send(formed) if self._resident and not self._oracle else now_ns
        if sent_ns > now_ns:
            self._events.at(sent_ns, self._sent, row, formed)
        else:
            self._sent(row, formed)

    def _sent(self, row: int, formed: Pass) -> None:
        for chunk in formed.chunks:
            if chunk.work.done_tokens == chunk.work.prompt_tokens:
                self._prefilled(chunk.work.round)
        self._start_pass(row, follows=True)

    def _prefilled(self, r: int) -> None:
        flight = self._flights[r]
        self._driver.prefill_done(r, flight.assignment)
        if not self._oracle:
            self._release_prefill(r, flight)
            stored = self._hit[r] + flight.assignment.recompute_tokens
            new_blocks = new_full_blocks(stored, self._prompt[r], self._block_tokens)
            if flight.in_hbm:
                self._stage(r, flight, new_blocks)
            path = PERSIST_GENERATED_PATH if flight.in_hbm else PERSIST_PROMPT_PATH
            self._persist(r, path, flight.de, new_blocks)
        if not flight.in_hbm:
            self._driver.hbm_allocated(flight.assignment)
        if self._generated[r] == 1:
            self._end_without_decode(r, flight)
        else:
            filled_ns = max(flight.filled_ns, self._events.now_ns)
            if not self._oracle and not flight.in_hbm:
                de, filled_bytes = flight.de, flight.fill_bytes()
                filled_ns = self._machine.charge(FILL_PATH, de, de, filled_bytes)
            self._events.at(filled_ns + self._admission_ns, self._filled, r, flight)

    def _stage(self, r: int, flight: Flight, new_blocks: int) -> None:
        """Copy a prompt's blocks out of the DE's HBM: new ones; for its cache all that it lacks."""
        staged_blocks = new_blocks
        if self._machine.has_dram_tier:
            full_blocks = self._prompt[r] // self._block_tokens
            staged_blocks = max(full_blocks - flight.de_blocks, new_blocks)
        staged_bytes = staged_blocks * self._limits.block_bytes
        self._machine.charge(STAGE_PATH, flight.de, flight.de, staged_bytes)

    def _end_without_decode(self, r: int, flight: Flight) -> None:
        record, first_ns = self._record, self._record.first_token_ns[r]
        record.decoding_ns[r] = record.second_token_ns[r] = first_ns
        if not self._oracle:
            self._release_decode(r, flight)
        self._finished(r)

    # 5 to 7 are at the DE if it computes the append: the hit is copied into HBM, then the append is
    # computed beside the DE's steps.

    def _fill_hit(self, r: int, flight: Flight) -> None:
        self._driver.hbm_allocated(flight.assignment)
        filled_ns = self._machine.charge(FILL_PATH, flight.de, flight.de, flight.fill_bytes())
        self._events.at(filled_ns + self._admission_ns, self._hit_filled, r, flight)

    def _hit_filled(self, r: int, flight: Flight) -> None:
        self._release_decode(r, flight)
        de = flight.de
        if de not in self._appends:
            limits = self._limits._replace(prefill_hbm_tokens=self._limits.decode_hbm_tokens)
            costs = self._setup.model.prefill
            self._appends[de] = PrefillUnit(de, 1, costs, limits, self._block_tokens)
        unit = self._appends[de]
        unit.add(de, PrefillWork(r, self._hit[r], self._prompt[r]))
        if not unit.busy:
            unit.busy = True
            self._events.at(self._events.now_ns, self._start_append, de)

    def _start_append(self, de: int) -> None:
        """Compute appends in one step of a DE: its other requests get their tokens after it."""
        unit, now_ns = self._appends[de], self._events.now_ns
        formed = unit.form_pass()
        unit.busy = formed is not None
        if formed is None:
            return
        for chunk in formed.chunks:
            if chunk.cached == chunk.work.hit_tokens:
                self._record.prefill_ns[chunk.work.round] = now_ns
        compute_ns = to_ns(formed.compute_s)
        self._decode_units[self._decode_unit_of[de]].stall(compute_ns)
        self._events.at(now_ns + compute_ns, self._appended, de, formed)

    def _appended(self, de: int, formed: Pass) -> None:
        for chunk in formed.chunks:
            work = chunk.work
            work.done_tokens += chunk.bsz
            if work.done_tokens == work.prompt_tokens:
                self._appends[de].queues[0].popleft()
                self._append_computed(work.round)
        # The next appends are computed beside the next step.
        step_ns = self._decode_units[self._decode_unit_of[de]].running_step_ns
        self._events.at(self._events.now_ns + step_ns, self._start_append, de)

    def _append_computed(self, r: int) -> None:
        flight, agent = self._flights[r], self._agent_of[r]
        self._record.first_token_ns[r] = self._events.now_ns
        self._driver.prefill_done(r, flight.assignment)
        first = self._hit[r] // self._block_tokens
        new_blocks = new_full_blocks(self._hit[r], self._prompt[r], self._block_tokens)
        self._persist(r, PERSIST_GENERATED_PATH, flight.de, new_blocks)
        self._machine.buffer(flight.de).cache(agent, first, first + new_blocks)
        if self._generated[r] > 1:
            self._decode(r, flight)
            return
        record = self._record
        record.decoding_ns[r] = record.second_token_ns[r] = record.first_token_ns[r]
        self._finished(r)

    # 8. Decode.

    def _filled(self, r: int, flight: Flight) -> None:
        if not self._oracle:
            self._release_decode(r, flight)
        self._decode(r, flight)

    def _decode(self, r: int, flight: Flight) -> None:
        self._record.decoding_ns[r] = self._events.now_ns
        unit = self._decode_units[self._decode_unit_of[flight.de]]
        second_ns = unit.join(r, self._prompt[r], self._generated[r])
        self._record.second_token_ns[r] = second_ns

    # 9. Finish.

    def _finished(self, r: int) -> None:
        now_ns, agent = self._events.now_ns, self._agent_of[r]
        flight = self._flights.pop(r)
        self._record.finish(r, now_ns)
        self._driver.finished(r, flight.assignment)
        stored = kv_tokens(self._prompt[r], self._generated[r])
        if not self._oracle:
            new_blocks = new_full_blocks(self._prompt[r], stored, self._block_tokens)
            self._persist(r, PERSIST_GENERATED_PATH, flight.de, new_blocks)
            full = self._prompt[r] // self._block_tokens
            self._machine.buffer(flight.de).cache(agent, full, full + new_blocks)
        if r < self._last_round[agent]:
            self._events.at(now_ns + self._delay_ns[r + 1], self._submit, r + 1)
        for child in self._children.get(r, ()):
            first = int(self._agents.first_round[child])
            start_ns = now_ns + to_ns(float(self._agents.start_s[child])) + self._delay_ns[first]
            self._events.at(start_ns, self._submit, first)

    def _persist(self, r: int, path: int, de: int, blocks: int) -> None:
        agent = self._agent_of[r]
        stored_ns = self._machine.charge(path, de, de, blocks * self._limits.block_bytes)
        self._stored_ns[agent] = max(self._stored_ns[agent], stored_ns)

    def _release_prefill(self, r: int, flight: Flight) -> None:
        agent = self._agent_of[r]
        self._release_thirds(agent, flight.thirds)
        if flight.own_blocks:
            whole = flight.whole_at_prefill() if self._machine.has_dram_tier else 0
            buffer = self._machine.buffer(flight.pe)
            buffer.release(agent, flight.own_first, flight.own_blocks, whole)

    def _release_decode(self, r: int, flight: Flight) -> None:
        agent = self._agent_of[r]
        whole = flight.whole_at_decode() if self._machine.has_dram_tier else 0
        buffer = self._machine.buffer(flight.de)
        buffer.release(agent, 0, flight.slots, min(whole, flight.slots))
        if whole > flight.slots:
            # What ``_stage`` has copied.
            buffer.cache(agent, flight.slots, whole)
