"""Failpoints: the functions of the system at which the steps of a request are reached.

They are wrapped only in the processes of a campaign; the system's code does not refer to them.  A
function that no longer exists is an error at once, so that no step silently stops being tested.
"""

import enum
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from dualpath.core.errors import ConfigError
from dualpath_lab.faults.matrix import Component, Step

_HANDLE = "dualpath.engine.control.traffic_manager:TrafficManager.handle"
_ATTEMPT = "dualpath.router.requests.request:Attempt"
_AT_ENGINES = "dualpath.router.scheduler.attempt:EngineAttempt"


class EngineKind(enum.StrEnum):
    """Which engines are under test."""

    EMULATED = "emulated"
    VLLM = "vllm"


class Failpoint(msgspec.Struct, frozen=True):
    """A step is reached when ``function`` ("module:Class.method") is called.

    If ``message`` is given, only calls with a first argument of that type count.
    """

    step: Step
    function: str
    message: str = ""


_ROUTER_POINTS = (
    Failpoint(Step.LOOKING_UP, f"{_AT_ENGINES}._look_up"),
    Failpoint(Step.WAITING, f"{_AT_ENGINES}._find_engines"),
    Failpoint(Step.RESERVING, f"{_AT_ENGINES}._reserve"),
    Failpoint(Step.READING, f"{_AT_ENGINES}._reading"),
    Failpoint(Step.PREFILLING, f"{_ATTEMPT}._prefill"),
    Failpoint(Step.HANDING_OVER, f"{_ATTEMPT}._stream_first"),
    Failpoint(Step.PERSISTING, f"{_AT_ENGINES}._buffer_complete"),
    Failpoint(Step.DECODING, f"{_ATTEMPT}._decode"),
    Failpoint(Step.H2D, f"{_AT_ENGINES}.kv_in_hbm"),
    Failpoint(Step.RELEASING, f"{_ATTEMPT}._release"),
)
_FRONT_END_POINTS = tuple(p for p in _ROUTER_POINTS if p.function.startswith(f"{_ATTEMPT}."))
#: PERSISTING of engines is in the middle of writing a file: see ``bad_disk``.
_ENGINE_POINTS = (
    Failpoint(Step.LOOKING_UP, _HANDLE, "Lookup"),
    Failpoint(Step.RESERVING, _HANDLE, "Assign"),
    Failpoint(Step.READING, "dualpath.storage.posix:PosixStorage.read"),
)
#: A transfer of KV is over; on the thread that moves KV.
_MOVED = "dualpath.engine.passes.pump:Completion.finish"
_PREFILL_POINTS = (
    Failpoint(Step.PREFILLING, _MOVED),
    Failpoint(Step.PREFILLING, "dualpath.engine.passes.forward_pass:ForwardPass.computed"),
    Failpoint(Step.HANDING_OVER, "dualpath.engine.control.traffic_manager:TrafficManager.sent"),
    Failpoint(Step.RELEASING, "dualpath.engine.control.traffic_manager:TrafficManager._free"),
)
_DECODE_POINTS = (
    Failpoint(Step.HANDING_OVER, "dualpath.engine.control.transfer_checks:TransferChecks.check"),
    Failpoint(Step.H2D, "dualpath.engine.control.traffic_manager:TrafficManager.fill_hbm"),
    Failpoint(Step.H2D, _MOVED),
    Failpoint(Step.RELEASING, _HANDLE, "Release"),
)
_PREFILL_RANK = (
    Failpoint(Step.PREFILLING, "dualpath.engine.ranks.follower:FollowedPass.computed"),
    Failpoint(Step.HANDING_OVER, "dualpath.engine.ranks.follower:Follower.end_pass"),
)
_DECODE_RANK = (
    Failpoint(Step.H2D, "dualpath.engine.ranks.follower:Follower.fill_hbm"),
    Failpoint(Step.PERSISTING, "dualpath.engine.ranks.follower:Follower.persist_generated"),
)
_EMULATED_PREFILL = (Failpoint(Step.WAITING, "dualpath_lab.emulated.prefill:PrefillEngine.submit"),)
_EMULATED_DECODE = (
    Failpoint(Step.WAITING, "dualpath_lab.emulated.decode:DecodeEngine.submit"),
    Failpoint(Step.DECODING, "dualpath_lab.emulated.decode:DecodeEngine._step"),
)
_VLLM_WAITING = Failpoint(Step.WAITING, "dualpath.vllm.scheduler_side:SchedulerSide.matched_tokens")
_VLLM_DECODING = Failpoint(Step.DECODING, "dualpath.vllm.scheduler_side:SchedulerSide.build")
FAILPOINTS: Mapping[EngineKind, Mapping[Component, tuple[Failpoint, ...]]] = {
    EngineKind.EMULATED: {
        Component.ROUTER: _ROUTER_POINTS,
        Component.PREFILL: (*_ENGINE_POINTS, *_PREFILL_POINTS, *_EMULATED_PREFILL),
        Component.DECODE: (*_ENGINE_POINTS, *_DECODE_POINTS, *_EMULATED_DECODE),
        Component.PREFILL_RANK: _PREFILL_RANK,
        Component.DECODE_RANK: _DECODE_RANK,
        Component.FRONT_END: _FRONT_END_POINTS,
    },
    EngineKind.VLLM: {
        Component.ROUTER: _ROUTER_POINTS,
        Component.PREFILL: (*_ENGINE_POINTS, *_PREFILL_POINTS, _VLLM_WAITING),
        Component.DECODE: (*_ENGINE_POINTS, *_DECODE_POINTS, _VLLM_WAITING, _VLLM_DECODING),
    },
}


def install_failpoints(points: tuple[Failpoint, ...], reached: Callable[[Step], None]) -> None:
    """Call ``reached`` with a step just before its function runs.

    Raises ``ConfigError`` for a function that does not exist.
    """
    for point in points:
        owner, name = _owner(point)
        setattr(owner, name, _watched(getattr(owner, name), point, reached))


def _owner(point: Failpoint) -> tuple[Any, str]:
    module, _, path = point.function.partition(":")
    class_name, _, name = path.partition(".")
    owner = getattr(importlib.import_module(module), class_name, None)
    if not hasattr(owner, name):
        raise ConfigError(
            f"the failpoint of step {point.step.value!r} is {point.function}, which does not "
            "exist; correct lab/dualpath_lab/faults/failpoints.py"
        )
    return owner, name


def _watched(
    function: Callable[..., Any], point: Failpoint, reached: Callable[[Step], None]
) -> Callable[..., Any]:
    step, message = point.step, point.message

    @functools.wraps(function)
    def watched(self: object, *args: Any, **named: Any) -> Any:  # noqa: ANN401 - of any function
        if not message or type(args[0]).__name__ == message:
            reached(step)
        return function(self, *args, **named)

    return watched
