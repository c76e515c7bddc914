"""What trainers call at an engine's core, and when the engine is in the cluster.

The functions are those of vLLM's ``EngineCore``; its scheduler and executor are small ones.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest
import torch
from tests.e2e.plain_engine import in_parallel

pytest.importorskip("vllm")

from vllm.distributed.utils import stateless_init_torch_distributed_process_group
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import DPEngineCoreProc, EngineCore, EngineCoreProc

from dualpath.core.errors import BadRequestError
from dualpath.launch.ports import claim_port
from dualpath.vllm import weight_updates
from dualpath.vllm.weight_updates import watch_trainers

NONCE = "0123456789abcdef"
STEP_1, STEP_2 = f"step-1-{NONCE}", f"step-2-{NONCE}"
LOADED = msgspec.UNSET
ALL_REDUCE = torch.distributed.all_reduce


class Executor:
    """Runs collective calls: those of vLLM are noted, those of ours move the engine."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.asleep = False

    @property
    def is_sleeping(self) -> bool:
        return self.asleep

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        if callable(method):
            method(None)
        else:
            self.log.append(method)
        return [None]

    def sleep(self, level: int) -> None:
        self.log.append(f"sleep {level}")
        self.asleep = True

    def wake_up(self, tags) -> None:
        self.asleep = tags == ["weights"]

    def reset_encoder_cache(self) -> None:
        """Nothing is cached."""

    reset_mm_cache = reset_encoder_cache


class Scheduler:
    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.pause_state = PauseState.UNPAUSED
        self.requests = ["r"]

    def finish_requests(self, request_ids, status):
        assert request_ids is None
        ended, self.requests = self.requests, []
        self.log += [f"{request} ends" for request in ended]
        return ended

    def set_pause_state(self, state: PauseState) -> None:
        self.pause_state = state

    def reset_prefix_cache(self, running: bool, connector: bool) -> bool:
        return True

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def reset_encoder_cache(self) -> None:
        """Nothing is cached."""


class Engine:
    """An ``EngineCoreProc`` without its process; ``log`` is what happens, in order."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, kind: type[EngineCoreProc] = EngineCoreProc
    ) -> None:
        self.log: list[str] = []
        self.core = core = object.__new__(kind)
        core.scheduler, core.model_executor = Scheduler(self.log), Executor(self.log)
        core.mm_receiver_cache = None
        core._weight_version = "default"
        core._idle_state_callbacks = []
        monkeypatch.setattr(core, "_send_abort_outputs", lambda requests: None)
        monkeypatch.setattr(core, "has_work", lambda: bool(core.scheduler.requests))
        side = SimpleNamespace(
            leave=self._leaves,
            join=lambda weights: self.log.append(f"joins with {weights or 'loaded'}"),
        )
        monkeypatch.setattr(weight_updates, "_worker_side", lambda: side)
        watch_trainers(
            SimpleNamespace(  # type: ignore[arg-type]
                scheduler_side=SimpleNamespace(
                    left=lambda: None,
                    joined=lambda: None,
                    forget_hbm_blocks=lambda: self.log.append("HBM is cleared"),
                )
            )
        )

    def _leaves(self, reason: str) -> bool:
        self.log.append("leaves")
        return True

    def take(self) -> list[str]:
        taken = [line for line in self.log if line != "synchronize_device"]
        self.log.clear()
        return taken

    def become_idle(self) -> None:
        self.core.scheduler.requests = []
        self.core._notify_idle_state_callbacks()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    with unwrapped_again():
        yield Engine(monkeypatch)


@contextmanager
def unwrapped_again() -> Iterator[None]:
    """Give vLLM's classes their own functions back after the block."""
    kinds = (EngineCore, EngineCoreProc, DPEngineCoreProc)
    before = {
        (kind, name): vars(kind)[name]
        for kind in kinds
        for name in weight_updates._WRAPPERS
        if name in vars(kind)
    }
    yield
    for (kind, name), function in before.items():
        setattr(kind, name, function)


class Rank(Engine):
    """One of two ranks of a data-parallel group; the other one does the same at the same time.

    ``others`` changes what the other rank reports of its weights.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch, DPEngineCoreProc)
        self.others: Callable[[torch.Tensor], torch.Tensor] = lambda own: own
        self.core.dp_group = object()
        self.core.pending_pause = self.core.engines_running = False
        self.core.ignore_start_dp_wave = False
        monkeypatch.setattr(torch.distributed, "all_reduce", self._all_reduce)

    def _all_reduce(self, tensor: torch.Tensor, op: object, group: object) -> None:
        assert group is self.core.dp_group
        if len(tensor) == 1:  # vLLM's barrier
            self.log.append("all ranks resume")
        else:
            tensor.copy_(torch.maximum(tensor, self.others(tensor)))

    def pause(self) -> None:
        """Pause, as all ranks do."""
        paused = self.core.pause_scheduler("wait")
        assert isinstance(paused, Future)
        self.core.pending_pause = self.core.engines_running = False
        self.core.ignore_start_dp_wave = True
        self.become_idle()
        assert paused.result(0) is None


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    with unwrapped_again():
        yield Rank(monkeypatch)


def test_a_step_of_training_ends_requests_before_weights_change(engine: Engine) -> None:
    core = engine.core
    core.pause_scheduler("abort")
    assert engine.take() == ["r ends", "leaves"]
    core.collective_rpc("update_weights", None, (), {"update_info": {}})
    assert engine.take() == ["HBM is cleared", "update_weights"]
    assert core.get_weight_version() == "default"
    core.set_weight_version(STEP_1)
    assert core.get_weight_version() == STEP_1
    assert engine.take() == []
    core.resume_scheduler()
    assert engine.take() == [f"joins with {STEP_1}"]
    core.resume_scheduler()
    assert engine.take() == []


def test_weights_that_change_without_a_pause_end_requests_as_well(engine: Engine) -> None:
    engine.core.collective_rpc("load_my_weights")
    assert engine.take() == ["r ends", "HBM is cleared", "leaves", "load_my_weights"]
    # Without a name nothing is known to have the same weights.
    engine.core.resume_scheduler()
    assert engine.take() == []
    engine.core.set_weight_version(STEP_1)
    assert engine.take() == [f"joins with {STEP_1}"]


@pytest.mark.parametrize("call", sorted(weight_updates.KEEPS_WEIGHTS))
def test_calls_that_change_nothing_end_no_request(engine: Engine, call: str) -> None:
    engine.core.collective_rpc(call)
    assert engine.core.scheduler.requests == ["r"]
    assert "leaves" not in engine.take()


def test_a_pause_that_waits_leaves_once_requests_have_ended(engine: Engine) -> None:
    paused = engine.core.pause_scheduler("wait")
    assert isinstance(paused, Future)
    assert engine.take() == []
    engine.become_idle()
    assert paused.result(0) is None
    assert engine.take() == ["leaves"]
    engine.core.resume_scheduler()
    assert engine.take() == ["joins with loaded"]


def test_an_engine_that_resumed_while_it_waited_stays(engine: Engine) -> None:
    paused = engine.core.pause_scheduler("wait")
    engine.core.resume_scheduler()
    engine.become_idle()
    assert paused.result(0) is None
    assert engine.take() == []


def test_weights_that_sleep_restores_keep_their_name(engine: Engine) -> None:
    engine.core.sleep(1)
    assert engine.take() == ["r ends", "leaves", "sleep 1"]
    assert engine.core.wake_up(["weights"]) is False
    assert engine.take() == []
    assert engine.core.wake_up() is True
    assert engine.take() == ["joins with loaded"]


def test_weights_that_sleep_discards_need_a_name(engine: Engine) -> None:
    engine.core.sleep(2)
    assert engine.take() == ["r ends", "HBM is cleared", "leaves", "sleep 2"]
    engine.core.wake_up()
    assert engine.take() == []
    engine.core.collective_rpc("reload_weights")
    engine.core.set_weight_version(STEP_1)
    assert engine.take() == ["HBM is cleared", "reload_weights", f"joins with {STEP_1}"]


def test_another_name_alone_counts_as_other_weights(engine: Engine) -> None:
    """A trainer may write into memory that it shares with the engine, without a call."""
    engine.core.set_weight_version(STEP_1)
    assert engine.take() == ["r ends", "HBM is cleared", "leaves", f"joins with {STEP_1}"]
    engine.core.set_weight_version(STEP_1)
    assert engine.take() == []


def test_wrapped_functions_take_the_arguments_that_clients_send(engine: Engine) -> None:
    core = engine.core
    for name, sent in {
        "collective_rpc": ["reload_weights", None, [], {}],
        "pause_scheduler": ["wait", True],
        "resume_scheduler": [],
        "set_weight_version": [STEP_1],
        "sleep": [1, "abort"],
    }.items():
        method = getattr(core, name)
        assert core._convert_msgspec_args(method, sent) is not None
        assert method.__name__ == name


def test_the_name_of_earlier_weights_is_refused(engine: Engine) -> None:
    core = engine.core
    for version in (STEP_1, STEP_2):
        core.collective_rpc("reload_weights")
        core.set_weight_version(version)
    core.collective_rpc("reload_weights")
    engine.take()
    for version in (STEP_1, STEP_2):
        with pytest.raises(BadRequestError, match="that of earlier weights of this engine"):
            core.set_weight_version(version)
    with pytest.raises(BadRequestError, match="16 hex digits"):
        core.set_weight_version("step-3")
    assert engine.take() == []
    assert core.get_weight_version() == "default"


def test_a_rank_of_a_group_joins_with_the_others(rank: Rank) -> None:
    rank.pause()
    assert rank.take() == ["leaves"]
    rank.core.collective_rpc("reload_weights")
    rank.core.set_weight_version(STEP_1)
    assert rank.take() == ["HBM is cleared", "reload_weights"]
    rank.core.resume_scheduler()
    assert rank.take() == ["all ranks resume", f"joins with {STEP_1}"]
    rank.core.set_weight_version(STEP_1)
    assert rank.take() == []


def test_a_group_whose_weights_sleep_restores_joins_again(rank: Rank) -> None:
    rank.pause()
    rank.core.model_executor.sleep(1)
    rank.core.wake_up()
    assert rank.take() == ["leaves", "sleep 1", "all ranks resume", "joins with loaded"]


@pytest.mark.parametrize(
    "others",
    [lambda own: own + torch.tensor([1, -1]), torch.zeros_like],
    ids=["other weights", "weights without a name"],
)
def test_a_group_with_unequal_ranks_stays_outside_until_they_are_equal(
    rank: Rank, others: Callable[[torch.Tensor], torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    rank.others = others
    rank.pause()
    rank.core.set_weight_version(STEP_1)
    rank.core.resume_scheduler()
    assert rank.take() == ["leaves", "HBM is cleared", "all ranks resume"]
    assert f"this rank's: weights {STEP_1}" in caplog.text
    rank.others = lambda own: own
    rank.pause()
    rank.core.resume_scheduler()
    assert rank.take() == ["all ranks resume", f"joins with {STEP_1}"]


def test_weights_of_a_group_that_serves_are_not_changed_at_one_rank(rank: Rank) -> None:
    changes: list[Callable[[], object]] = [
        lambda: rank.core.collective_rpc("reload_weights"),
        lambda: rank.core.set_weight_version(STEP_1),
        lambda: rank.core.sleep(2),
    ]
    for change in changes:
        with pytest.raises(BadRequestError, match="call /pause at all of its ranks at once"):
            change()
    assert rank.core.scheduler.requests == ["r"]
    assert rank.take() == []
    rank.core.collective_rpc("check_health")


@pytest.mark.parametrize("versions", [(STEP_1, STEP_1), (STEP_1, STEP_2)], ids=["equal", "unequal"])
def test_ranks_agree_by_the_collectives_of_their_group(
    versions: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks are threads, their group is one of vLLM's, as are its pause and its resume."""
    here, port = threading.local(), claim_port()
    joined: tuple[list[str], list[str]] = ([], [])

    def step(number: int) -> None:
        here.number, core = number, ranks[number].core
        core.dp_group = stateless_init_torch_distributed_process_group(
            "127.0.0.1", port, number, len(ranks), backend="gloo"
        )
        core.step_counter, core.dp_sync_interval = 0, 1
        paused = core.pause_scheduler("wait")
        while core.engines_running:
            core.engines_running = core._has_global_unfinished_reqs(local_unfinished=False)
        ranks[number].become_idle()
        assert paused.result(0) is None
        core.collective_rpc("reload_weights")
        core.set_weight_version(versions[number])
        core.resume_scheduler()

    with unwrapped_again():
        first = Rank(monkeypatch)
    with unwrapped_again():
        ranks = [first, Rank(monkeypatch)]  # What the last one has wrapped serves both.
        side = SimpleNamespace(
            leave=lambda reason: True, join=lambda weights: joined[here.number].append(weights)
        )
        monkeypatch.setattr(weight_updates, "_worker_side", lambda: side)
        monkeypatch.setattr(torch.distributed, "all_reduce", ALL_REDUCE)
        in_parallel([partial(step, number) for number in range(2)])
    same = versions[0] == versions[1]
    assert joined == (([STEP_1], [STEP_1]) if same else ([], []))
