"""Assigns a request whose PE and DE are known: what it counts for, and where its hit comes from.

That is decided when it is assigned, by what its engines were believed to keep of its hit when it
was submitted.  Until its DE has granted the slots, others may have pushed that out; then it is
decided anew, as if the request counted for no read and no computation yet.  Its engines stay, and
hits that were to be computed again are.
"""

from collections.abc import Mapping

import msgspec

from dualpath.core.cluster import Role
from dualpath.policy.events import Assignment
from dualpath.policy.flights import Flight, Flights
from dualpath.policy.hit_sources import HitSource, HitSources
from dualpath.policy.load import Ledger
from dualpath.policy.placement import Placement, Ticket
from dualpath.policy.recompute import more_weight, weight_tokens


class Assigner:
    """Charges the ledger with assignments; the settings are those of ``hits``."""

    def __init__(self, ledger: Ledger, hits: HitSources, flights: Flights) -> None:
        self._ledger = ledger
        self._hits = hits
        self._flights = flights

    def assign(self, flight: Flight, prefill: Placement, decode: Placement) -> Assignment:
        """Number a request at both of its engines and choose its reads."""
        ticket = flight.ticket
        engines = {Role.PREFILL: prefill.engine_id, Role.DECODE: decode.engine_id}
        source = self._hits.choose(ticket.request.hit_tokens, ticket.kept_tokens, engines)
        weight = weight_tokens(source.recompute_tokens, self._hits.settings.computed_weight)
        prefill_seq = self._ledger.assign(prefill.engine_id, ticket.request_id, weight)
        decode_seq = self._ledger.assign(decode.engine_id, ticket.request_id)
        reads = self._read_tokens(ticket, source)
        reading = {engines[side]: tokens for side, tokens in reads.items() if tokens}
        for engine_id, tokens in reading.items():
            self._ledger.charge_read(engine_id, ticket.request_id, tokens)
        assignment = Assignment(
            request_id=ticket.request_id,
            prefill_engine=prefill.engine_id,
            decode_engine=decode.engine_id,
            prefill_assign_seq=prefill_seq,
            decode_assign_seq=decode_seq,
            reads=source.runs,
            pe_reason=prefill.reason,
            de_reason=decode.reason,
            read_reason=source.reason,
            prefill_tokens=ticket.prefill_tokens + weight,
            decode_tokens=ticket.decode_tokens,
            prefill_read_tokens=reads[Role.PREFILL],
            decode_read_tokens=reads[Role.DECODE],
            recompute_tokens=source.recompute_tokens,
        )
        self._flights.assign(flight, assignment, tuple(reading))
        self._set_computing(flight, source)
        return assignment

    def choose_anew(
        self, flight: Flight, old: Assignment, kept_blocks: Mapping[Role, int]
    ) -> Assignment:
        """Choose an assigned request's reads, of whose hit its engines keep ``kept_blocks`` now."""
        ticket = flight.ticket
        engines = {side: old.at(side).engine_id for side in Role}
        for side in Role:
            self._ledger.change(engines[side], old.request_id, 0, -old.at(side).read_tokens)
        self._flights.set_computing(flight, 0)
        hit_tokens = ticket.request.hit_tokens - old.recompute_tokens
        block_tokens = self._hits.settings.block_tokens
        kept = {e: min(kept_blocks[s] * block_tokens, hit_tokens) for s, e in engines.items()}
        source = self._hits.choose(hit_tokens, kept, engines)
        source = source.computing_more(old.recompute_tokens)
        more = more_weight(
            old.recompute_tokens, source.recompute_tokens, self._hits.settings.computed_weight
        )
        reads = self._read_tokens(ticket, source)
        anew = msgspec.structs.replace(
            old,
            reads=source.runs,
            read_reason=source.reason,
            prefill_tokens=old.prefill_tokens + more,
            prefill_read_tokens=reads[Role.PREFILL],
            decode_read_tokens=reads[Role.DECODE],
            recompute_tokens=source.recompute_tokens,
        )
        for side in Role:
            tokens = anew.at(side).tokens - old.at(side).tokens
            self._ledger.change(engines[side], old.request_id, tokens, reads[side])
        self._flights.read_anew(flight, anew)
        self._set_computing(flight, source)
        return anew

    def _read_tokens(self, ticket: Ticket, source: HitSource) -> Mapping[Role, int]:
        """Return what storage has to read at either side."""
        hit_tokens = ticket.request.hit_tokens - source.recompute_tokens
        tokens = dict.fromkeys(Role, 0)
        for run in source.runs:
            if not run.cached:
                tokens[run.side] = run.tokens(self._hits.settings.block_tokens, hit_tokens)
        return tokens

    def _set_computing(self, flight: Flight, source: HitSource) -> None:
        request = flight.ticket.request
        misses = request.prompt_tokens - request.hit_tokens
        self._flights.set_computing(flight, misses + source.recompute_tokens)
