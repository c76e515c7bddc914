"""Where the steps of a request are in the code: functions of the system, which knows nothing of it.

Wrapped in the processes of a campaign only.  A function that is gone is an error at once, so that
no step silently stops being tested.
"""

import enum
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.laboratory.chaos.matrix import Component, Step

_HANDLE = "dualpath.engine.traffic_manager:TrafficManager.handle"
_ATTEMPT = "dualpath.router.requests.lifecycle:Attempt"
_AT_ENGINES = "dualpath.router.attempts.engine_attempt:EngineAttempt"
_LOADING = "dualpath.router.attempts.loading:Loading"


class EngineKind(enum.StrEnum):
    """Which engines are under test."""

    EMULATED = "emulated"
    VLLM = "vllm"


class Point(msgspec.Struct, frozen=True):
    """A step is reached when ``function`` ("module:Class.method") is called.

    With ``message`` only if it is called with one of that type.
    """

    step: Step
    function: str
    message: str = ""


_ROUTER_POINTS = (
    Point(Step.LOOKING_UP, f"{_AT_ENGINES}._look_up"),
    Point(Step.WAITING, f"{_AT_ENGINES}._find_engines"),
    Point(Step.RESERVING, f"{_LOADING}._reserve"),
    Point(Step.READING, f"{_LOADING}._read"),
    Point(Step.PREFILLING, f"{_ATTEMPT}._prefill"),
    Point(Step.HANDING_OVER, f"{_ATTEMPT}._stream_first"),
    Point(Step.PERSISTING, f"{_AT_ENGINES}._persist"),
    Point(Step.DECODING, f"{_ATTEMPT}._decode"),
    Point(Step.H2D, f"{_AT_ENGINES}._kv_in_hbm"),
    Point(Step.RELEASING, f"{_ATTEMPT}._give_back"),
)
_FRONT_END_POINTS = tuple(p for p in _ROUTER_POINTS if p.function.startswith(f"{_ATTEMPT}."))
#: PERSISTING of engines is in the middle of a file: ``bad_disk``.
_ENGINE_POINTS = (
    Point(Step.LOOKING_UP, _HANDLE, "Lookup"),
    Point(Step.RESERVING, _HANDLE, "Assign"),
    Point(Step.READING, "dualpath.storage.posix:PosixStorage.read"),
    Point(Step.RELEASING, _HANDLE, "Release"),
)
_PREFILL_POINTS = (
    Point(Step.PREFILLING, "dualpath.engine.forward_pass:ForwardPass.computed"),
    Point(Step.HANDING_OVER, "dualpath.engine.traffic_manager:TrafficManager.sent"),
)
_DECODE_POINTS = (
    Point(Step.HANDING_OVER, "dualpath.engine.transfer_checks:TransferChecks.check"),
    Point(Step.H2D, "dualpath.engine.traffic_manager:TrafficManager.fill_hbm"),
)
_PREFILL_RANK = (
    Point(Step.PREFILLING, "dualpath.engine.follower:FollowedPass.computed"),
    Point(Step.HANDING_OVER, "dualpath.engine.follower:Follower.end_pass"),
)
_DECODE_RANK = (
    Point(Step.H2D, "dualpath.engine.follower:Follower.fill_hbm"),
    Point(Step.PERSISTING, "dualpath.engine.follower:Follower.persist_generated"),
)
_EMULATED_PREFILL = (
    Point(Step.WAITING, "dualpath.laboratory.emulated.prefill:PrefillEngine.submit"),
)
_EMULATED_DECODE = (
    Point(Step.WAITING, "dualpath.laboratory.emulated.decode:DecodeEngine.submit"),
    Point(Step.DECODING, "dualpath.laboratory.emulated.decode:DecodeEngine._step"),
)
_VLLM_WAITING = Point(Step.WAITING, "dualpath.vllm.scheduler_side:SchedulerSide.matched_tokens")
_VLLM_DECODING = Point(Step.DECODING, "dualpath.vllm.scheduler_side:SchedulerSide.build")
POINTS: Mapping[EngineKind, Mapping[Component, tuple[Point, ...]]] = {
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


def watch_points(points: tuple[Point, ...], reached: Callable[[Step], None]) -> None:
    """Call ``reached`` whenever a step is, just before its function runs.

    Raises ``ConfigError`` for a function that does not exist.
    """
    for point in points:
        owner, name = _owner(point)
        setattr(owner, name, _watched(getattr(owner, name), point, reached))


def _owner(point: Point) -> tuple[Any, str]:
    module, _, path = point.function.partition(":")
    class_name, _, name = path.partition(".")
    owner = getattr(importlib.import_module(module), class_name, None)
    if not hasattr(owner, name):
        raise ConfigError(
            f"step {point.step.value!r} is where {point.function} is called, which does not exist; "
            "correct laboratory/chaos/points.py"
        )
    return owner, name


def _watched(
    function: Callable[..., Any], point: Point, reached: Callable[[Step], None]
) -> Callable[..., Any]:
    step, message = point.step, point.message

    @functools.wraps(function)
    def watched(self: object, *args: Any, **named: Any) -> Any:  # noqa: ANN401 - of any function
        if not message or type(args[0]).__name__ == message:
            reached(step)
        return function(self, *args, **named)

    return watched
