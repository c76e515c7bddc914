"""The weights of all engines change together, or all engines sleep, as a trainer asks the router.

An operation holds new requests back, waits for those that run or ends them, sends vLLM's calls for
trainers to every engine, and lets requests go on once all engines are back with one version of the
weights.  An operation that fails leaves the requests waiting and the engines as they are; its
report names what failed and how to go on.  Repeating an update with the same version calls only the
engines that do not have these weights yet.
"""

import asyncio
import enum
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Protocol, TypeVar

import aiohttp
import msgspec
from msgspec import Meta

from dualpath.core.errors import BadRequestError, DeadlineError, DualPathError, EngineLostError
from dualpath.core.names import in_one_line
from dualpath.core.weights import checked_version, shown_version, weights_version
from dualpath.node.certificates import trusting
from dualpath.node.http_client import client_session, sent
from dualpath.router.scheduler.registry import Registry
from dualpath.router.token_api.statuses import api_error, engine_error, status_of
from dualpath.router.token_api.wire import decode_body

WEIGHTS_PATH = "/dualpath/v1/weights"
#: vLLM's call that returns the version of an engine's weights.
VERSION_PATH = "/weight_info"

#: vLLM's calls that an update may consist of.
UPDATE_PATHS = frozenset(
    {
        "/collective_rpc",
        "/init_weight_transfer_engine",
        "/shutdown_weight_transfer_engine",
        "/start_draft_weight_update",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
    }
)
#: How often an operation looks whether requests have ended and engines have joined.
_POLL_S = 0.05
#: Engines that have not joined after this time did not get these weights, or have ended.
_JOIN_S = 60.0
_ERROR_CHARACTERS = 500

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Action(enum.StrEnum):
    """What a trainer asks for."""

    UPDATE = "update"
    SLEEP = "sleep"
    WAKE_UP = "wake_up"
    RESUME = "resume"


class Running(enum.StrEnum):
    """What becomes of running requests, as vLLM's modes of a pause."""

    WAIT = "wait"
    """They are finished first."""
    ABORT = "abort"
    """They end with the tokens that they have and the finish reason ``abort``."""
    KEEP = "keep"
    """They are continued with the new weights; all of their KV is computed again."""


class State(enum.StrEnum):
    """What is being done; ``FAILED`` and ``ASLEEP`` last until the next operation."""

    SERVING = "serving"
    PAUSING = "pausing"
    APPLYING = "applying"
    RESUMING = "resuming"
    ASLEEP = "asleep"
    FAILED = "failed"


class EngineCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A POST of vLLM's to every engine: path, JSON body and query."""

    path: str
    body: dict[str, Any] = msgspec.field(default_factory=dict)
    query: dict[str, str | list[str]] = msgspec.field(default_factory=dict)


class WeightsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of the POST.

    An update makes ``calls`` one after the other, each at all engines at once.  ``label`` names new
    weights; the router adds a nonce.  ``version`` is the name of an earlier answer: a repeated
    update.  ``level`` is that of a sleep, ``tags`` are those of a wake-up.  ``without`` are engines
    that are left out, and stay out of the cluster.
    """

    action: Action
    running: Running = Running.WAIT
    label: str = ""
    version: str = ""
    calls: tuple[EngineCall, ...] = ()
    level: Annotated[int, Meta(ge=1, le=2)] = 1
    tags: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    timeout_s: Annotated[float, Meta(gt=0, le=86400)] = 600.0


class EngineOperator(Protocol):
    """Sends calls for trainers to engines' HTTP servers; raises ``DualPathError`` if one fails."""

    async def post(
        self, engine_id: str, api_url: str, call: EngineCall, timeout_s: float
    ) -> object:
        """Return the decoded answer of an engine."""
        ...

    async def weights(self, engine_id: str, api_url: str, timeout_s: float) -> str:
        """Return the version of an engine's weights; no version if they have no name."""
        ...


class HttpOperator:
    """The ``EngineOperator`` over HTTP; a session for each call, of which there are few."""

    def __init__(self, headers: Mapping[str, str], ca_file: str = "") -> None:
        self._headers = dict(headers)
        self._ca_file = ca_file

    async def post(
        self, engine_id: str, api_url: str, call: EngineCall, timeout_s: float
    ) -> object:
        """See ``EngineOperator``."""
        more = {
            "params": call.query,
            "data": msgspec.json.encode(call.body),
            "headers": {"Content-Type": "application/json"},
        }
        return await self._called("POST", engine_id, api_url, call.path, timeout_s, more)

    async def weights(self, engine_id: str, api_url: str, timeout_s: float) -> str:
        """See ``EngineOperator``."""
        found = await self._called("GET", engine_id, api_url, VERSION_PATH, timeout_s, {})
        return str(found.get("weight_version", "")) if isinstance(found, dict) else ""

    async def _called(
        self,
        method: str,
        engine_id: str,
        api_url: str,
        path: str,
        timeout_s: float,
        more: Mapping[str, Any],
    ) -> object:
        named = f"engine {engine_id} at {api_url}"
        tls = trusting(self._ca_file, "engine_ca_file")
        timeout, url = aiohttp.ClientTimeout(total=timeout_s), f"{api_url.rstrip('/')}{path}"
        try:
            async with (
                client_session(timeout=timeout, headers=self._headers, tls=tls) as session,
                sent(session, method, url, **more) as response,
            ):
                status, text = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineLostError(
                f"{named} does not answer {path} ({error or 'in time'}); start it again, or leave "
                "it out"
            ) from error
        if status != 200:
            message = in_one_line(text.decode(errors="replace"), _ERROR_CHARACTERS)
            raise engine_error(named, status, f"{path}: {message}")
        try:
            return msgspec.json.decode(text) if text else None
        except msgspec.DecodeError:
            return None


class Cluster(Protocol):
    """What an operation needs of the scheduler that serves the cluster."""

    @property
    def registry(self) -> Registry:
        """The engines."""
        ...

    def hold(self, *, held: bool) -> None:
        """Begin no attempt, at present engines and those that join; or begin them again."""
        ...

    def running(self) -> int:
        """Return how many requests have their engines, or decode there."""
        ...

    def take_out(self, engine_id: str, reason: str) -> None:
        """End the session of an engine, if it has one."""
        ...


class Operation(msgspec.Struct):
    """The latest operation, for reports; ``updated`` are engines that have got its weights."""

    action: Action
    version: str = ""
    error: str = ""
    updated: set[str] = msgspec.field(default_factory=set)


class WeightUpdates:
    """Runs one operation at a time; lives in the scheduler's event loop."""

    def __init__(
        self,
        cluster: Cluster,
        operator: EngineOperator,
        clock: Callable[[], float],
        counted: Callable[[str, bool], None] = lambda action, ok: None,
        new_nonce: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        self._cluster = cluster
        self._operator = operator
        self._clock = clock
        self._counted = counted
        self._new_nonce = new_nonce
        self.state = State.SERVING
        self._since_s = clock()
        self._operation: Operation | None = None
        self._running = Running.KEEP
        #: URLs of the engines that were called since requests are held, by name.
        self._engines: dict[str, str] = {}
        self._deadline_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._released = asyncio.Event()
        self._released.set()

    @property
    def holds(self) -> bool:
        """Whether no attempt begins at present."""
        return self.state is not State.SERVING

    @property
    def aborts(self) -> bool:
        """Whether a request whose attempt has failed ends with the tokens that it has."""
        return self.holds and self._running is Running.ABORT

    async def released(self) -> None:
        """Wait until attempts may begin; the caller has a limit."""
        await self._released.wait()

    def report(self) -> dict[str, Any]:
        """Return state, versions and engines, JSON-safe."""
        registry, operation = self._cluster.registry, self._operation
        return {
            "state": self.state.value,
            "for_s": round(self._clock() - self._since_s, 3),
            "weights": registry.weights or None,
            "shown": shown_version(registry.weights),
            "under_way": self._task is not None and not self._task.done(),
            "action": operation.action.value if operation else None,
            "version": (operation.version or None) if operation else None,
            "error": (operation.error or None) if operation else None,
            "updated": sorted(operation.updated) if operation else [],
            "outdated": {
                name: shown_version(hello.namespace.weights)
                for name, hello in registry.outdated.items()
            },
        }

    def request(self, asked: WeightsRequest) -> dict[str, Any]:
        """Begin an operation; return the report with its version.

        Raises ``BadRequestError`` if it cannot be done, ``EngineLostError`` without any engine.
        """
        if self._task is not None and not self._task.done():
            raise BadRequestError(
                f"{self._shown()} is under way; ask again when it is over, as GET {WEIGHTS_PATH} "
                "shows"
            )
        operation, work = self._planned(asked)
        self._add_engines(asked.without)
        if not self._engines:
            raise EngineLostError("no engine has registered; start the engines first")
        self._operation = operation
        self._task = asyncio.create_task(
            self._run(operation, work, asked.timeout_s), name=f"weights: {asked.action.value}"
        )
        return self.report()

    async def stop(self) -> None:
        """End the operation; idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _shown(self) -> str:
        operation = self._operation
        if operation is None:
            return "nothing"
        return f"{operation.action.value} {operation.version}".rstrip()

    def _planned(
        self, asked: WeightsRequest
    ) -> tuple[Operation, Callable[[Operation], Awaitable[None]]]:
        match asked.action:
            case Action.UPDATE:
                return self._planned_update(asked)
            case Action.SLEEP:
                return Operation(Action.SLEEP), lambda operation: self._sleep(asked)
            case Action.WAKE_UP:
                return Operation(Action.WAKE_UP), lambda operation: self._wake_up(asked)
            case Action.RESUME:
                return Operation(Action.RESUME), lambda operation: self._serve_as_they_are()

    def _planned_update(
        self, asked: WeightsRequest
    ) -> tuple[Operation, Callable[[Operation], Awaitable[None]]]:
        if not asked.calls or (
            other := [c.path for c in asked.calls if c.path not in UPDATE_PATHS]
        ):
            found = ", ".join(other) if asked.calls else "none"
            raise BadRequestError(
                f"the calls of an update are {found}; give at least one of "
                f"{', '.join(sorted(UPDATE_PATHS))}"
            )
        if bool(asked.label) == bool(asked.version):
            raise BadRequestError(
                "an update needs either a label for new weights, or the version of an update that "
                "is to be repeated"
            )
        if asked.label:
            operation = Operation(Action.UPDATE, weights_version(asked.label, self._new_nonce()))
        else:
            operation = Operation(Action.UPDATE, checked_version(asked.version))
        return operation, lambda planned: self._update(asked, planned)

    # ------------------------------------------------------------------ operations

    async def _run(
        self,
        operation: Operation,
        work: Callable[[Operation], Awaitable[None]],
        timeout_s: float,
    ) -> None:
        self._deadline_s = asyncio.get_running_loop().time() + timeout_s
        try:
            await work(operation)
        except DualPathError as error:
            self._failed(operation, str(error))
        except Exception as error:  # a defect must not leave an operation that seems to go on
            logger.exception("weights: %s failed", self._shown())
            self._failed(operation, repr(error))
        else:
            logger.info("weights: %s is done, the cluster is %s", self._shown(), self.state.value)
        self._counted(operation.action.value, not operation.error)

    def _failed(self, operation: Operation, why: str) -> None:
        operation.error = f"{why}. {self._remedy(operation)}"
        self._enter(State.FAILED)
        logger.error("weights: %s failed: %s", self._shown(), operation.error)

    @staticmethod
    def _remedy(operation: Operation) -> str:
        again = "Ask again once that is mended"
        if operation.action is Action.UPDATE:
            again = f"Once that is mended, repeat the update with version {operation.version}"
        return f"Requests wait. {again}; `dualpath weights resume` lets engines serve as they are"

    async def _update(self, asked: WeightsRequest, operation: Operation) -> None:
        asleep = self.state is State.ASLEEP
        if not asleep:
            await self._pause(asked.running)
        self._enter(State.APPLYING)
        # An answer may have been lost: only the engine knows what it has.
        found = await self._each(
            self._engines, lambda name, url: self._operator.weights(name, url, self._left_s())
        )
        left = [name for name in self._engines if found[name] != operation.version]
        operation.updated.update(set(self._engines).difference(left))
        for call in asked.calls:
            await self._at(left, call)
        await self._at(
            left, EngineCall("/update_weight_version", {"new_version": operation.version})
        )
        operation.updated.update(left)
        for state in self._cluster.registry.require_weights(operation.version):
            self._cluster.take_out(state.info.engine_id, "the weights of the cluster change")
        if asleep:
            self._enter(State.ASLEEP)
        else:
            await self._resume()

    async def _sleep(self, asked: WeightsRequest) -> None:
        await self._pause(asked.running)
        self._enter(State.APPLYING)
        call = EngineCall("/sleep", query={"level": str(asked.level), "mode": "abort"})
        await self._at(self._engines, call)
        self._enter(State.ASLEEP)

    async def _wake_up(self, asked: WeightsRequest) -> None:
        self._hold(self._running)
        self._enter(State.APPLYING)
        call = EngineCall("/wake_up", query={"tags": [*asked.tags]} if asked.tags else {})
        answers = await self._at(self._engines, call)
        if all(isinstance(a, dict) and a.get("status") == "awake" for a in answers.values()):
            await self._resume()
        else:
            self._enter(State.ASLEEP)

    async def _pause(self, running: Running) -> None:
        self._hold(running)
        self._enter(State.PAUSING)
        # An engine that is restarted meanwhile has the weights of its model's files.
        self._cluster.registry.require_weights(self._cluster.registry.weights)
        while running is Running.WAIT and (left := self._cluster.running()):
            if self._left_s() <= 0:
                raise DeadlineError(
                    f"{left} requests still run; wait longer, or abort or keep the running ones"
                )
            await asyncio.sleep(_POLL_S)
        mode = "wait" if running is Running.WAIT else "abort"
        await self._at(self._engines, EngineCall("/pause", query={"mode": mode}))
        for name in self._engines:
            self._cluster.take_out(name, "it is paused for its trainer")

    async def _resume(self) -> None:
        """Let all engines compute again, and requests go on once the engines have joined."""
        self._hold(self._running)
        self._enter(State.RESUMING)
        await self._at(self._engines, EngineCall("/resume"))
        give_up_s = asyncio.get_running_loop().time() + _JOIN_S
        while absent := self._absent():
            if asyncio.get_running_loop().time() > give_up_s:
                raise EngineLostError(self._why_absent(absent))
            await asyncio.sleep(_POLL_S)
        self._engines.clear()
        self._enter(State.SERVING)
        self._cluster.hold(held=False)
        self._released.set()

    async def _serve_as_they_are(self) -> None:
        self._cluster.registry.allow_any_weights()
        await self._resume()

    def _absent(self) -> list[str]:
        return [name for name in self._engines if self._cluster.registry.live(name) is None]

    def _why_absent(self, absent: Sequence[str]) -> str:
        outdated = self._cluster.registry.outdated
        names = ", ".join(
            f"{name} ({shown_version(outdated[name].namespace.weights)})"
            if name in outdated
            else name
            for name in absent
        )
        return (
            f"engines {names} have not joined within {_JOIN_S:g} s after they were resumed; see "
            "their logs, and update those with other weights, or leave them out"
        )

    # ------------------------------------------------------------------ steps

    async def _at(self, names: Iterable[str], call: EngineCall) -> dict[str, object]:
        """Make a call at these engines at once."""
        if self._left_s() <= 0:
            raise DeadlineError(f"the time was over before {call.path} was called; allow more")
        return await self._each(
            names, lambda name, url: self._operator.post(name, url, call, self._left_s())
        )

    async def _each(
        self, names: Iterable[str], work: Callable[[str, str], Awaitable[T]]
    ) -> dict[str, T]:
        """Return what ``work`` returns for each engine; raise the first error after all ended.

        A server passes each call on to all ranks of a data-parallel group that it serves, so that
        it is called once for them.
        """
        by_url: dict[str, list[str]] = {}
        for name in names:
            by_url.setdefault(self._engines[name], []).append(name)
        answers = await asyncio.gather(
            *(work(served[0], url) for url, served in by_url.items()), return_exceptions=True
        )
        found: dict[str, T] = {}
        for served, answer in zip(by_url.values(), answers, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            found |= dict.fromkeys(served, answer)
        return found

    def _left_s(self) -> float:
        return self._deadline_s - asyncio.get_running_loop().time()

    def _hold(self, running: Running) -> None:
        self._running = running
        self._released.clear()
        self._cluster.hold(held=True)

    def _enter(self, state: State) -> None:
        if state is not self.state:
            self.state, self._since_s = state, self._clock()
            logger.info("weights: the cluster is %s", state.value)

    def _add_engines(self, without: Sequence[str]) -> None:
        """Add the engines that are live or were refused for their weights; drop those left out."""
        registry = self._cluster.registry
        known = {info.engine_id: info.api_url for info in registry.alive()}
        known |= {name: hello.api_url for name, hello in registry.outdated.items()}
        self._engines |= known
        if unknown := [name for name in without if name not in self._engines]:
            raise BadRequestError(
                f"without names {', '.join(unknown)}, which are no engines of this cluster; it has "
                f"{', '.join(sorted(self._engines)[:16])}"
            )
        for name in without:
            del self._engines[name]


def weights_call(updates: WeightUpdates, body: bytes | None) -> tuple[int, object]:
    """Return status and JSON of a call; ``body`` of a POST, None for a GET."""
    if body is None:
        return 200, updates.report()
    try:
        return 200, updates.request(decode_body(body, WeightsRequest))
    except DualPathError as error:
        return status_of(error), {"error": api_error(error)}
