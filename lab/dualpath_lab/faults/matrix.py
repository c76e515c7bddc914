"""The matrix of faults: component x step of a request x fault, drawn from a seed.  Pure."""

import enum
import random
from collections.abc import Collection, Iterator, Sequence

import msgspec


class Component(enum.StrEnum):
    """The component that a fault hits."""

    ROUTER = "router"
    PREFILL = "PE"
    DECODE = "DE"
    STORAGE = "storage"
    CONNECTION = "connection"
    PREFILL_RANK = "PE rank"
    DECODE_RANK = "DE rank"
    FRONT_END = "front end"

    @property
    def failure_domain(self) -> "Component":
        """The component that ends with it: a rank's engine, itself otherwise."""
        return _ENGINE_OF.get(self, self)

    @property
    def is_engine(self) -> bool:
        """Whether an engine ends with it."""
        return self.failure_domain in _ENGINE_OF.values()


_ENGINE_OF = {
    Component.PREFILL_RANK: Component.PREFILL,
    Component.DECODE_RANK: Component.DECODE,
}


class Step(enum.StrEnum):
    """The step of a request at which a fault is injected, in order."""

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
    """The fault that is injected."""

    KILL = "SIGKILL"
    KILL_ONE = "SIGKILL of one process"
    STOP = "SIGSTOP"
    STOP_ONE = "SIGSTOP of one process"
    HANG = "hanging thread"
    TERMINATE = "SIGTERM"
    OTHER_ROLE = "other role"
    RESET_CONTROL = "reset control"
    RESET_HTTP = "reset HTTP"
    RESET_CLIENTS = "reset clients"
    SILENT_CONTROL = "silent control"
    SILENT_HTTP = "silent HTTP"
    DROP_CONTROL = "dropped control"
    DROP_HTTP = "dropped HTTP"
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
#: Of an engine's processes (API server, engine core, a rank) or of its threads.
_PARTS = (Fault.KILL_ONE, Fault.STOP_ONE, Fault.HANG)
FAULTS_OF = {
    Component.ROUTER: _SIGNALS,
    # OTHER_ROLE: to the other role and back again.
    Component.PREFILL: (*_SIGNALS, *_PARTS, Fault.OTHER_ROLE),
    Component.DECODE: (*_SIGNALS, *_PARTS, Fault.OTHER_ROLE),
    Component.STORAGE: (
        *(Fault.FULL, Fault.IO_ERROR, Fault.SLOW, Fault.READ_ONLY, Fault.REMOVED),
        *(Fault.BIT_FLIPS, Fault.TRUNCATED, Fault.SWAPPED, Fault.NO_FILE),
    ),
    Component.CONNECTION: (
        *(Fault.RESET_CONTROL, Fault.RESET_HTTP, Fault.RESET_CLIENTS),
        *(Fault.SILENT_CONTROL, Fault.SILENT_HTTP, Fault.DROP_CONTROL, Fault.DROP_HTTP),
    ),
    # SIGTERM goes to an engine's first rank, which ends the others.
    Component.PREFILL_RANK: (Fault.KILL, Fault.STOP, Fault.HANG),
    Component.DECODE_RANK: (Fault.KILL, Fault.STOP, Fault.HANG),
    # Control is its connection to the scheduler.
    Component.FRONT_END: (
        *(*_SIGNALS, Fault.RESET_CONTROL, Fault.SILENT_CONTROL, Fault.DROP_CONTROL),
    ),
}
_SILENCES = (
    *(Fault.STOP_ONE, Fault.HANG),
    *(Fault.SILENT_CONTROL, Fault.SILENT_HTTP, Fault.DROP_CONTROL, Fault.DROP_HTTP),
)
#: Faults of stored blocks at rest.
CORRUPTIONS = frozenset({Fault.BIT_FLIPS, Fault.TRUNCATED, Fault.SWAPPED, Fault.NO_FILE})

#: The steps that a process of each component passes; a DE answers a request's look-up.
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
    # In clusters with front ends the router passes the other steps.
    Component.FRONT_END: (Step.PREFILLING, Step.HANDING_OVER, Step.DECODING, Step.RELEASING),
}
#: A step is passed often: a fault is injected at one of this many passes, e.g. at some layer.
_MOST_PASSES = {Step.READING: 20, Step.PREFILLING: 12, Step.DECODING: 20, Step.PERSISTING: 6}
_FEW_PASSES = 3
#: Separates the name of an engine from the number of its rank.
RANK_MARK = "/"
#: Shorter and longer than an engine's time-out.
_STOP_S = (0.3, 1.5, 6.0)
_STORAGE_S = (0.3, 1.0, 2.0)
#: Shorter and longer than the router needs to notice a part of an engine that is silent, and
#: longer than the default deadline of a request.
_SILENT_S = (1.5, 6.0, 15.0, 40.0)


class PlannedFault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault to inject when ``process`` passes ``step`` for the ``passes``-th time from now.

    ``lasts_s`` is how long a process is stopped, a connection silent or the storage faulty.  For a
    component that is not a process, ``process`` is one that uses it.
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
        """The engine to which its process belongs."""
        return self.process.partition(RANK_MARK)[0]


class ProcessNames(msgspec.Struct, frozen=True):
    """Names of a cluster's processes by component; ranks exclude the first of each engine.

    ``front_ends`` are separate processes; if there are any, the router serves no clients.
    """

    router: str
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    prefill_ranks: tuple[str, ...] = ()
    decode_ranks: tuple[str, ...] = ()
    front_ends: tuple[str, ...] = ()

    def passing(self, component: Component, step: Step) -> tuple[str, ...]:
        """Return the processes in which a fault of the component can be injected at the step."""
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
    """Return the process name of a tensor-parallel rank of an engine.

    Rank 0 has the engine's name.  Ranks of data-parallel groups are engines (``core.cluster``).
    """
    return f"{engine}{RANK_MARK}{rank}" if rank else engine


def planned_faults(
    seed: int,
    process_names: ProcessNames,
    components: Collection[Component] = tuple(Component),
    without: Collection[Fault] = (),
) -> Iterator[PlannedFault]:
    """Yield an endless sequence of faults: all cells of the matrix in random order, repeatedly."""
    chance = random.Random(seed)
    cells = [
        (component, step, fault)
        for component in Component
        if component in components
        for step in Step
        if process_names.passing(component, step)
        for fault in FAULTS_OF[component]
        if fault not in without
    ]
    number = 0
    while cells:
        for component, step, fault in chance.sample(cells, len(cells)):
            yield PlannedFault(
                number=number,
                component=component,
                process=chance.choice(process_names.passing(component, step)),
                step=step,
                fault=fault,
                passes=chance.randint(1, _MOST_PASSES.get(step, _FEW_PASSES)),
                lasts_s=_duration_s(fault, chance),
            )
            number += 1


def _duration_s(fault: Fault, chance: random.Random) -> float:
    if fault is Fault.STOP:
        return chance.choice(_STOP_S)
    if fault in _SILENCES:
        return chance.choice(_SILENT_S)
    return chance.choice(_STORAGE_S) if fault in FAULTS_OF[Component.STORAGE] else 0.0


def cells_of(components: Sequence[Component]) -> int:
    """Return the number of cells of the matrix of these components, for engines of one rank."""
    process_names = ProcessNames("router", ("pe",), ("de",))
    return sum(
        len(FAULTS_OF[c]) for c in components for step in Step if process_names.passing(c, step)
    )
