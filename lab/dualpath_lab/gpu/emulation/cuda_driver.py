"""CUDA streams, events and copies in host memory, with the driver's and the runtime's calls.

Work of torch is over when its call returns, as on a CPU.  Copies are queued: each stream that has
copies has a thread, so a copy may end long after its call.  A stream in which torch computes cannot
be made to wait later, so ``wait_event`` on it blocks the calling thread.
"""

import contextlib
import ctypes
import itertools
import threading
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Self

SUCCESS, INVALID_VALUE = 0, 1
#: A copy that takes longer has lost its thread.
_WAIT_S = 120.0


class Stream:
    """A stream; ``computes`` is true once torch's work is queued on it."""

    _handles: ClassVar[dict[int, "Stream"]] = {}
    _numbers = itertools.count(1)

    def __init__(self, device: object = None, **options: object) -> None:
        self.device = device
        self.stream_id = self.cuda_stream = next(self._numbers)
        self.computes = False
        self._change = threading.Condition()
        self._work: deque[Callable[[], object]] = deque()
        self._thread: threading.Thread | None = None
        self._handles[self.cuda_stream] = self

    @classmethod
    def of_handle(cls, handle: int) -> "Stream":
        """Return the stream that the driver knows by this handle."""
        return cls._handles[int(handle)]

    def queue(self, work: Callable[[], object]) -> None:
        """Run ``work`` on the stream's thread, after all work queued before."""
        with self._change:
            self._work.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            self._change.notify_all()

    def query(self) -> bool:
        """Whether all queued work is over."""
        return not self._work

    def synchronize(self) -> None:
        """Block until all queued work is over."""
        with self._change:
            if not self._change.wait_for(self.query, _WAIT_S):
                raise RuntimeError(f"the work of a stream was not over within {_WAIT_S:g} s")

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record an event after the work queued so far."""
        found = event or Event()
        found.record(self)
        return found

    def wait_event(self, event: "Event") -> None:
        """Let work queued from now on start after the event."""
        recorded = event.recorded
        if self.computes:
            _wait(recorded)
        elif not recorded.is_set():
            self.queue(lambda: _wait(recorded))

    def wait_stream(self, other: "Stream") -> None:
        """Let work queued from now on start after the work of another stream."""
        self.wait_event(other.record_event())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave the ``with`` block of a stream."""

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: bool(self._work))
                work = self._work[0]
            work()
            with self._change:
                self._work.popleft()
                self._change.notify_all()


#: The stream of every thread, in which torch computes.
DEFAULT_STREAM = Stream()
DEFAULT_STREAM.computes = True


class Event:
    """An event; it has passed before it is recorded, as CUDA's."""

    def __init__(self, *_: object, **options: object) -> None:
        #: What the last ``record`` waits for; a later one does not change earlier waits.
        self.recorded = threading.Event()
        self.recorded.set()

    def record(self, stream: Stream | None = None) -> None:
        """Record it after the work queued so far on the stream."""
        self.recorded = over = threading.Event()
        on = stream or DEFAULT_STREAM
        if on.query():
            over.set()
        else:
            on.queue(over.set)

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait for it."""
        (stream or DEFAULT_STREAM).wait_event(self)

    def query(self) -> bool:
        """Whether it has passed."""
        return self.recorded.is_set()

    def synchronize(self) -> None:
        """Block until it has passed."""
        _wait(self.recorded)

    def elapsed_time(self, _: "Event") -> float:
        """Return a time in milliseconds, which means nothing."""
        return 0.001


def _wait(over: threading.Event) -> None:
    if not over.wait(_WAIT_S):
        raise RuntimeError(f"an event was not reached within {_WAIT_S:g} s")


class Runtime:
    """The runtime's calls that page-lock memory; ``pinned`` are (address, end) of locked ranges."""

    def __init__(self) -> None:
        self.pinned: list[tuple[int, int]] = []

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> SimpleNamespace:
        """Lock a range."""
        insort(self.pinned, (address, address + size_bytes))
        return SimpleNamespace(value=SUCCESS)

    def cudaHostUnregister(self, address: int) -> SimpleNamespace:
        """Unlock the range that starts here."""
        found = [entry for entry in self.pinned if entry[0] == address]
        self.pinned = [entry for entry in self.pinned if entry[0] != address]
        return SimpleNamespace(value=SUCCESS if found else INVALID_VALUE)

    def is_pinned(self, address: int, size_bytes: int) -> bool:
        """Whether a range is inside a locked one."""
        before = bisect_right(self.pinned, (address, 1 << 64)) - 1
        return before >= 0 and address + size_bytes <= self.pinned[before][1]


RUNTIME = Runtime()


def torch_cuda(runtime: Runtime = RUNTIME) -> dict[str, object]:
    """Return the calls of ``torch.cuda`` on streams, events and pinned memory, by name."""
    return {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: DEFAULT_STREAM,
        "default_stream": lambda device=None: DEFAULT_STREAM,
        "device": lambda device=None: contextlib.nullcontext(),
        "set_device": lambda device: None,
        "cudart": lambda: runtime,
    }


def driver_module(runtime: Runtime = RUNTIME, *, batches: bool = True) -> ModuleType:
    """Return a module in place of ``cuda.bindings.driver``, in the form of cuda-bindings 13.

    A copy without an end in pinned memory is refused: on a GPU it would not be asynchronous.
    Without ``batches`` the driver lacks the batch call.
    """

    def queue(copies: Sequence[tuple[int, int, int]], stream: int) -> tuple[int]:
        if not all(
            runtime.is_pinned(source, size_bytes) or runtime.is_pinned(destination, size_bytes)
            for destination, source, size_bytes in copies
        ):
            return (INVALID_VALUE,)

        def move() -> None:
            for destination, source, size_bytes in copies:
                ctypes.memmove(destination, source, size_bytes)

        Stream.of_handle(stream).queue(move)
        return (SUCCESS,)

    def copy(destination: int, source: int, size_bytes: int, stream: int) -> tuple[int]:
        return queue([(destination, source, size_bytes)], stream)

    def copy_batch(
        destinations: Sequence[int],
        sources: Sequence[int],
        sizes: Sequence[int],
        count: int,
        attributes: Sequence[object],
        indices: Sequence[int],
        attribute_count: int,
        stream: int,
    ) -> tuple[int]:
        if not batches:
            raise RuntimeError("function cuMemcpyBatchAsync is not found")
        copies = list(zip(destinations, sources, sizes, strict=True))
        if (len(copies), len(attributes), list(indices)) != (
            count,
            attribute_count,
            [0],
        ) or not count:
            return (INVALID_VALUE,)
        return queue(copies, stream)

    module: Any = ModuleType("cuda.bindings.driver")
    module.cuDriverGetVersion = lambda: (SUCCESS, 13000)
    module.cuMemcpyAsync = copy
    module.cuMemcpyBatchAsync = copy_batch
    module.CUdeviceptr = int
    module.CUmemcpyAttributes = SimpleNamespace
    module.CUmemcpySrcAccessOrder = SimpleNamespace(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM=1)
    found: ModuleType = module
    return found
