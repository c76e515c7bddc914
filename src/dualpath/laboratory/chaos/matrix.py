"""What is done to a cluster: component x step of a request x fault, drawn from a seed.  Pure."""

import enum
import random
from collections.abc import Collection, Iterator, Sequence

import msgspec


class Component(enum.StrEnum):
    """What a fault hits."""

    ROUTER = "router"
    PREFILL = "PE"
    DECODE = "DE"
    STORAGE = "storage"
    CONNECTION = "connection"
    PREFILL_RANK = "PE rank"
    DECODE_RANK = "DE rank"
    FRONT_END = "front end"

    @property
    def whole(self) -> "Component":
        """What ends with it: a rank's engine, itself otherwise."""
        return _ENGINE_OF.get(self, self)

    @property
    def is_engine(self) -> bool:
        """Whether an engine ends with it."""
        return self.whole in _ENGINE_OF.values()


_ENGINE_OF = {
    Component.PREFILL_RANK: Component.PREFILL,
    Component.DECODE_RANK: Component.DECODE,
}


class Step(enum.StrEnum):
    """Where a request is when the fault comes; the order of its life."""

    LOOKING_UP = "looking up"
    WAITING = "waiting"
    RESERVING = "reserving"
    READING = "reading"
    PREFILLING = "prefilling"
    HANDING_OVER = "handing over"
    H2D = "H2D"
    DECODING = "decoding"
    PERSISTING = "persisting"
    RELEASING = "releasing"


class Fault(enum.StrEnum):
    """What happens."""

    KILL = "SIGKILL"
    STOP = "SIGSTOP"
    TERMINATE = "SIGTERM"
    OTHER_ROLE = "other role"
    RESET_CONTROL = "reset control"
    RESET_HTTP = "reset HTTP"
    RESET_CLIENTS = "reset clients"
    FULL = "full"
    IO_ERROR = "EIO"
    SLOW = "slow"
    READ_ONLY = "read-only"
    REMOVED = "removed"
    BIT_FLIPS = "bit flips"
    TRUNCATED = "truncated"
    SWAPPED = "swapped"
    NO_FILE = "no file"


_SIGNALS = (Fault.KILL, Fault.STOP, Fault.TERMINATE)
FAULTS_OF = {
    Component.ROUTER: _SIGNALS,
    # To the other role and back again.
    Component.PREFILL: (*_SIGNALS, Fault.OTHER_ROLE),
    Component.DECODE: (*_SIGNALS, Fault.OTHER_ROLE),
    Component.STORAGE: (
        *(Fault.FULL, Fault.IO_ERROR, Fault.SLOW, Fault.READ_ONLY, Fault.REMOVED),
        *(Fault.BIT_FLIPS, Fault.TRUNCATED, Fault.SWAPPED, Fault.NO_FILE),
    ),
    Component.CONNECTION: (Fault.RESET_CONTROL, Fault.RESET_HTTP, Fault.RESET_CLIENTS),
    # SIGTERM is for an engine's first rank, which lets the others end.
    Component.PREFILL_RANK: (Fault.KILL, Fault.STOP),
    Component.DECODE_RANK: (Fault.KILL, Fault.STOP),
    Component.FRONT_END: _SIGNALS,
}
#: Faults of a stored block as it lies there.
CORRUPTIONS = frozenset({Fault.BIT_FLIPS, Fault.TRUNCATED, Fault.SWAPPED, Fault.NO_FILE})

#: The steps that a process of each component passes; a request's look-up is answered by a DE.
_PASSED = {
    Component.ROUTER: tuple(Step),
    Component.PREFILL: (
        *(Step.WAITING, Step.RESERVING, Step.READING, Step.PREFILLING, Step.HANDING_OVER),
        Step.RELEASING,
    ),
    Component.DECODE: (
        *(Step.LOOKING_UP, Step.WAITING, Step.RESERVING, Step.READING, Step.HANDING_OVER),
        *(Step.H2D, Step.DECODING, Step.PERSISTING, Step.RELEASING),
    ),
    Component.PREFILL_RANK: (Step.PREFILLING, Step.HANDING_OVER),
    Component.DECODE_RANK: (Step.H2D, Step.PERSISTING),
    # Where there are some, the router passes all others.
    Component.FRONT_END: (Step.PREFILLING, Step.HANDING_OVER, Step.DECODING, Step.RELEASING),
}
#: A step is passed often: a fault comes at one of the first so many passes, say at some layer.
_MOST_PASSES = {Step.READING: 20, Step.PREFILLING: 12, Step.DECODING: 20, Step.PERSISTING: 6}
_FEW_PASSES = 3
#: Between the name of an engine and the number of its rank.
RANK_MARK = "/"
#: A resumed process has missed heartbeats for less or for more than an engine's time-out.
_STOP_S = (0.3, 1.5, 6.0)
_STORAGE_S = (0.3, 1.0, 2.0)


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """One fault to be made: when ``process`` passes ``step`` for the ``passes``-th time from now.

    ``lasts_s`` is how long a process stands still or the storage misbehaves.  Where the component
    is no process, the step is reached in one of its users.
    """

    number: int
    component: Component
    process: str
    step: Step
    fault: Fault
    passes: int
    lasts_s: float

    @property
    def engine(self) -> str:
        """The engine of its process, where that is a rank of one."""
        return self.process.partition(RANK_MARK)[0]


class Cast(msgspec.Struct, frozen=True):
    """The processes of a cluster by component; ranks are those of engines but for the first.

    ``front_ends`` are those that are no part of the router, which then serves no clients.
    """

    router: str
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    prefill_ranks: tuple[str, ...] = ()
    decode_ranks: tuple[str, ...] = ()
    front_ends: tuple[str, ...] = ()

    def passing(self, component: Component, step: Step) -> tuple[str, ...]:
        """Return the processes in which a fault of that component can come at that step."""
        by_component = {
            Component.ROUTER: (self.router,) if self._in_router(step) else (),
            Component.PREFILL: self.prefill,
            Component.DECODE: self.decode,
            Component.PREFILL_RANK: self.prefill_ranks,
            Component.DECODE_RANK: self.decode_ranks,
            Component.FRONT_END: self.front_ends,
        }
        engines = (Component.PREFILL, Component.DECODE)
        users = (component,) if component in by_component else engines
        return tuple(name for user in users if step in _PASSED[user] for name in by_component[user])

    def _in_router(self, step: Step) -> bool:
        return not self.front_ends or step not in _PASSED[Component.FRONT_END]


def follower_name(engine: str, rank: int) -> str:
    """Return what the process of a rank is called that computes for an engine of several devices.

    The first one is the engine's.  Ranks of data-parallel groups are engines (``core.cluster``).
    """
    return f"{engine}{RANK_MARK}{rank}" if rank else engine


def strikes(
    seed: int,
    cast: Cast,
    components: Collection[Component] = tuple(Component),
    without: Collection[Fault] = (),
) -> Iterator[Strike]:
    """Yield faults without end: every cell of the matrix once, in random order, then again."""
    chance = random.Random(seed)
    cells = [
        (component, step, fault)
        for component in Component
        if component in components
        for step in Step
        if cast.passing(component, step)
        for fault in FAULTS_OF[component]
        if fault not in without
    ]
    number = 0
    while cells:
        for component, step, fault in chance.sample(cells, len(cells)):
            yield Strike(
                number=number,
                component=component,
                process=chance.choice(cast.passing(component, step)),
                step=step,
                fault=fault,
                passes=chance.randint(1, _MOST_PASSES.get(step, _FEW_PASSES)),
                lasts_s=_duration_s(fault, chance),
            )
            number += 1


def _duration_s(fault: Fault, chance: random.Random) -> float:
    if fault is Fault.STOP:
        return chance.choice(_STOP_S)
    return chance.choice(_STORAGE_S) if fault in FAULTS_OF[Component.STORAGE] else 0.0


def cells_of(components: Sequence[Component]) -> int:
    """Return how many cells the matrix of these components has, for engines of one rank each."""
    cast = Cast("router", ("pe",), ("de",))
    return sum(len(FAULTS_OF[c]) for c in components for step in Step if cast.passing(c, step))
