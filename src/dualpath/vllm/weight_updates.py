"""A trainer pauses an engine, puts it to sleep and changes its weights through vLLM's own calls.

vLLM's routes for trainers all end in the process of the engine's core, in a few functions of
``EngineCore``.  These are wrapped, so that it does not matter which route a trainer calls, or
whether the router calls it for a trainer:

- *An engine is in the cluster while it is not paused, is awake and its weights have a name.*  It
  leaves as an engine that ends, with all of its KV outside HBM; it joins as a new one, with the
  version of its weights in its namespace.
- *A call that may change weights* ends all requests of the engine first, and clears the prefix
  cache in HBM.  So no request has KV of two versions, and nothing computed before is found after.
  What may change weights is every collective call except those in ``KEEPS_WEIGHTS``: trainers bring
  methods of their own.
- *The name* of the new weights comes from the trainer, as vLLM's ``weight_version``
  (``core.weights``).  An engine without it stays outside.  Another name alone counts as a change.
- *The ranks of a data-parallel group* compute with each other's experts, so that new weights at one
  rank change the KV of all.  vLLM completes a pause once all ranks are paused, and lets all of them
  go on at once.  So weights change, and get their name, only while the group is outside the
  cluster, and it joins when it is resumed: all ranks if all have the same version, else none.
"""

import functools
import hashlib
import logging
import os
import signal
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec

from dualpath.core.errors import BadRequestError
from dualpath.core.weights import WeightsVersion, checked_version, shown_version

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

    from dualpath.vllm.connector import DualPathConnector

log = logging.getLogger(__name__)

#: Collective calls that change no weights, of vLLM's own.
KEEPS_WEIGHTS = frozenset(
    {
        "check_health",
        "compute_weight_checksums",
        "init_weight_transfer_engine",
        "shutdown_weight_transfer_engine",
        "synchronize_device",
    }
)
#: The sleep level from which on vLLM discards weights; below, it restores them when it wakes up.
_DISCARDS_WEIGHTS = 2
#: Versions that an engine remembers, so that none is given to other weights.
_VERSIONS_KEPT = 4096


#: vLLM's version of weights that have got no name.
UNNAMED = "default"


class TrainedEngine:
    """What trainers do to one engine; lives in the process of its core, on the core's thread."""

    def __init__(self, core: "EngineCore", connector: "DualPathConnector") -> None:
        self._core = core
        self._connector = connector
        #: None while the weights have no name.
        self._version: WeightsVersion | msgspec.UnsetType | None = msgspec.UNSET
        self._past: deque[WeightsVersion] = deque(maxlen=_VERSIONS_KEPT)
        self._is_member = True
        #: Depth of nested calls: vLLM's classes call the function of their base.
        self.resuming = 0

    def weights_change(self, call: str) -> None:
        """Take the engine out of the cluster before a call that may change its weights.

        Raises ``BadRequestError`` for a rank of a group that is in the cluster.
        """
        self._check_outside(call)
        self._end_requests()
        if isinstance(self._version, str):
            self._past.append(self._version)
        self._version = None
        self._core._weight_version = UNNAMED  # What `/weight_info` returns.
        self._leave(f"its weights change ({call}); name them with weight_version")

    def named(self, version: str) -> None:
        """The trainer names the weights; raises ``BadRequestError`` for a name it may not give."""
        if version == self._version:
            return
        if checked_version(version) in self._past:
            raise BadRequestError(
                f"weight version {version} is that of earlier weights of this engine, whose KV is "
                "stored; name these weights otherwise"
            )
        self._check_outside(f"the name {version}")
        if self._version is not None:
            # They have changed in a way that is no call, such as by memory that a trainer shares.
            self.weights_change("their new name")
        self._version = version
        if self._group is None:
            self.join_if_ready()

    def paused(self) -> None:
        """Take the engine out of the cluster: it computes no request until it resumes."""
        self._leave("it is paused")

    def resumed(self, *, was_paused: bool) -> None:
        """The engine computes again; ``was_paused`` is the same at all ranks of a group."""
        if self._group is None or (was_paused and self._all_ranks_agree()):
            self.join_if_ready()

    def join_if_ready(self) -> None:
        """Join the cluster, unless the engine is paused or asleep or its weights have no name."""
        version = self._version
        if self._is_member or not self._is_up() or version is None:
            return
        self._in_workers(functools.partial(_join, weights=version))
        self._is_member = True
        self._connector.scheduler_side.joined()
        log.info("the engine joins the cluster again with %s", shown_version(version))

    @property
    def _group(self) -> Any:  # noqa: ANN401 - of torch
        """The ranks of the engine's data-parallel group, None without one."""
        return getattr(self._core, "dp_group", None)

    def _is_up(self) -> bool:
        return not (self._core.is_scheduler_paused() or self._core.model_executor.is_sleeping)

    def _check_outside(self, what: str) -> None:
        if self._group is not None and self._is_member:
            raise BadRequestError(
                f"{what} would change the weights of one rank of a data-parallel group that serves;"
                " call /pause at all of its ranks at once, then this, then /resume"
            )

    def _all_ranks_agree(self) -> bool:
        """Return whether all ranks may join with this version; each rank calls it at once."""
        import torch

        shown = shown_version(self._version) if self._version is not None else "no name"
        digest = hashlib.sha256(shown.encode()).digest()[:7]
        ready = self._is_up() and self._version is not None
        code = 1 + int.from_bytes(digest, "big") if ready else 0
        both = torch.tensor([code, -code], dtype=torch.int64, device="cpu")
        torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX, group=self._group)
        largest, smallest = int(both[0]), -int(both[1])
        if largest == smallest != 0:
            return True
        log.error(
            "the data-parallel group does not join the cluster: its ranks have different weights, "
            "or some have no name (this rank's: %s); pause all ranks, update those that differ, "
            "and resume all",
            shown,
        )
        return False

    def _leave(self, reason: str) -> None:
        if not self._is_member:
            return
        self._is_member = False
        self._connector.scheduler_side.left()
        log.info("the engine leaves the cluster: %s", reason)
        self._in_workers(functools.partial(_leave, reason=reason))

    def _in_workers(self, call: Callable[[object], None]) -> None:
        self._core.model_executor.collective_rpc(call)

    def _end_requests(self) -> None:
        """End all requests and clear all KV that a later request could find in HBM."""
        from vllm.v1.request import RequestStatus

        core = self._core
        ended = core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        if ended:
            log.warning("%d requests end, because the weights change", len(ended))
            core._send_abort_outputs(ended)
        self._connector.scheduler_side.forget_hbm_blocks()
        core.reset_encoder_cache()


def _leave(worker: object, reason: str) -> None:
    """Let one worker leave the cluster; its process ends if its transfers do not."""
    if not _worker_side().leave(reason):
        log.critical("the engine ends itself: its transfers are not over, and may still write")
        os.kill(os.getpid(), signal.SIGKILL)


def _join(worker: object, weights: WeightsVersion | msgspec.UnsetType) -> None:
    _worker_side().join(weights)


def _worker_side() -> Any:  # noqa: ANN401 - of this process's connector
    from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group

    return get_kv_transfer_group().worker_side


# -------------------------------------------------------------------------------- wrapped functions


def watch_trainers(connector: "DualPathConnector") -> None:
    """Wrap the functions of ``EngineCore`` that serve trainers; called while it is created."""
    from vllm.v1.engine import core

    kinds = [kind for kind in vars(core).values() if _is_core(kind, core.EngineCore)]
    found: dict[int, TrainedEngine] = {}

    def engine(owner: "EngineCore") -> TrainedEngine:
        return found.setdefault(id(owner), TrainedEngine(owner, connector))

    for kind in kinds:
        for name, wrapper in _WRAPPERS.items():
            if (original := vars(kind).get(name)) is not None:
                setattr(kind, name, _wrapped(original, wrapper, engine))


def _is_core(kind: object, base: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, base)


_EngineOf = Callable[["EngineCore"], TrainedEngine]


def _wrapped(
    original: Callable[..., Any], wrapper: Callable[..., Any], engine: _EngineOf
) -> Callable[..., Any]:
    """Return a method with the signature of the original, by which vLLM converts arguments."""

    @functools.wraps(original)
    def method(core: "EngineCore", *arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - vLLM's
        return wrapper(core, original, engine, *arguments, **named)

    return method


def _collective_rpc(
    core: "EngineCore",
    original: Callable[..., Any],
    engine: _EngineOf,
    method: str | Callable[..., Any],
    *arguments: Any,  # noqa: ANN401 - vLLM's
    **named: Any,  # noqa: ANN401 - vLLM's
) -> Any:  # noqa: ANN401 - vLLM's
    name = method if isinstance(method, str) else getattr(method, "__name__", "a function")
    if name not in KEEPS_WEIGHTS:
        engine(core).weights_change(name)
    return original(core, method, *arguments, **named)


def _set_weight_version(
    core: "EngineCore", original: Callable[..., Any], engine: _EngineOf, weight_version: str
) -> None:
    engine(core).named(weight_version)
    original(core, weight_version)


def _pause_scheduler(
    core: "EngineCore",
    original: Callable[..., Any],
    engine: _EngineOf,
    *arguments: Any,  # noqa: ANN401 - vLLM's
    **named: Any,  # noqa: ANN401 - vLLM's
) -> "Future[Any] | None":
    pausing = original(core, *arguments, **named)
    if pausing is None:
        engine(core).paused()
        return None
    over: Future[Any] = Future()

    def complete(pause: "Future[Any]") -> None:
        try:
            pause.result()
            if core.is_scheduler_paused():
                engine(core).paused()
        except Exception as error:
            over.set_exception(error)
        else:
            over.set_result(None)

    pausing.add_done_callback(complete)
    return over


def _resume_scheduler(core: "EngineCore", original: Callable[..., None], engine: _EngineOf) -> None:
    trained, was_paused = engine(core), core.is_scheduler_paused()
    trained.resuming += 1
    try:
        original(core)
    finally:
        trained.resuming -= 1
    if not trained.resuming:
        # All ranks of a group have been resumed.
        trained.resumed(was_paused=was_paused)


def _sleep(
    core: "EngineCore",
    original: Callable[..., Any],
    engine: _EngineOf,
    level: int = 1,
    *arguments: Any,  # noqa: ANN401 - vLLM's
    **named: Any,  # noqa: ANN401 - vLLM's
) -> Any:  # noqa: ANN401 - vLLM's
    if level >= _DISCARDS_WEIGHTS:
        engine(core).weights_change(f"sleep level {level}")
    return original(core, level, *arguments, **named)


_WRAPPERS: dict[str, Callable[..., Any]] = {
    "collective_rpc": _collective_rpc,
    "pause_scheduler": _pause_scheduler,
    "resume_scheduler": _resume_scheduler,
    "set_weight_version": _set_weight_version,
    "sleep": _sleep,
}
