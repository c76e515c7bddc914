"""Which engines step together, and how that changes when a node changes its role."""

from dualpath.core.cluster import Role
from dualpath.sim.costs import pass_s
from dualpath.sim.derived import Limits
from dualpath.sim.layout import ClusterLayout
from dualpath.sim.reference.decode import DecodeUnit, Finished
from dualpath.sim.reference.events import EventQueue
from dualpath.sim.reference.prefill import Pass, PrefillUnit
from dualpath.sim.settings import PrefillCosts, Setup


class LeavablePrefillUnit(PrefillUnit):
    """A prefill unit whose engines may leave; a pass then is the work of those that are left."""

    def __init__(
        self, first: int, count: int, costs: PrefillCosts, limits: Limits, block_tokens: int
    ) -> None:
        super().__init__(first, count, costs, limits, block_tokens)
        self._left = 0

    def leave(self, engines: int) -> None:
        """So many engines without work are gone."""
        self._left += engines

    def form_pass(self) -> Pass | None:
        """Pack the next pass, None without work."""
        formed = super().form_pass()
        if formed is None or not self._left:
            return formed
        costs, count = self._costs, len(self.queues) - self._left
        compute_s = pass_s(
            formed.attention_max_s,
            formed.tokens / count,
            costs.batch_s,
            costs.feed_forward_token_s,
            costs.exchange_token_s,
            costs.interleaved,
        )
        mean_s = formed.attention_mean_s * len(self.queues) / count
        return formed._replace(compute_s=compute_s, attention_mean_s=mean_s)


class LeavableDecodeUnit(DecodeUnit):
    """A decode unit whose engines may leave; the steps of the others then take longer."""

    def leave(self, engines: int) -> None:
        """So many engines without requests are gone."""
        self._advance()
        self._engines -= engines
        if self._engines:
            self._expect_next()


class Units:
    """All units, and which of them an engine belongs to; units that are empty stay in the lists."""

    def __init__(
        self,
        setup: Setup,
        limits: Limits,
        layout: ClusterLayout,
        events: EventQueue,
        finished: Finished,
    ) -> None:
        self._setup = setup
        self._limits = limits
        self._events = events
        self._finished = finished
        self.prefill: list[LeavablePrefillUnit] = []
        self.decode: list[LeavableDecodeUnit] = []
        self.prefill_of: dict[int, int] = {}
        self.decode_of: dict[int, int] = {}
        for unit in layout.prefill_units:
            self._add(unit, Role.PREFILL)
        for unit in layout.decode_units:
            self._add(unit, Role.DECODE)

    def leave(self, engines: range, role: Role) -> None:
        """Take engines without work out of their units."""
        for engine in engines:
            if role is Role.PREFILL:
                self.prefill[self.prefill_of.pop(engine)].leave(1)
            else:
                self.decode[self.decode_of.pop(engine)].leave(1)

    def join(self, engines: range, role: Role) -> None:
        """Let a node's engines step in a role: together with lock-step, else each for itself."""
        if self._setup.cluster.lockstep:
            self._add(engines, role)
        else:
            for engine in engines:
                self._add(range(engine, engine + 1), role)

    def _add(self, engines: range, role: Role) -> None:
        setup, count = self._setup, len(engines)
        if role is Role.PREFILL:
            self.prefill_of.update(dict.fromkeys(engines, len(self.prefill)))
            block_tokens = setup.cluster.block_tokens
            costs = setup.model.prefill
            unit = LeavablePrefillUnit(engines[0], count, costs, self._limits, block_tokens)
            self.prefill.append(unit)
        else:
            self.decode_of.update(dict.fromkeys(engines, len(self.decode)))
            costs_of_step = setup.model.decode
            self.decode.append(
                LeavableDecodeUnit(self._events, count, costs_of_step, self._finished)
            )
