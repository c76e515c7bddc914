"""Which engines step together, and how that changes when a node changes its role."""

from dualpath.core.cluster import Role
from dualpath.model.sim.derived import Limits
from dualpath.model.sim.layout import ClusterLayout
from dualpath.model.sim.reference.decode import DecodeUnit, Finished
from dualpath.model.sim.reference.events import EventQueue
from dualpath.model.sim.reference.prefill import PrefillUnit
from dualpath.model.sim.settings import Setup


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
        self.prefill: list[PrefillUnit] = []
        self.decode: list[DecodeUnit] = []
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
            unit = PrefillUnit(engines[0], count, costs, self._limits, block_tokens)
            self.prefill.append(unit)
        else:
            self.decode_of.update(dict.fromkeys(engines, len(self.decode)))
            costs_of_step = setup.model.decode
            self.decode.append(DecodeUnit(self._events, count, costs_of_step, self._finished))
