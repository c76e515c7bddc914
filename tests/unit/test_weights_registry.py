"""A cluster has one version of the weights, whichever engines come, leave and register again."""

import contextlib

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.router_fakes import FakeEngine

from dualpath.core.cluster import (
    HostProcess,
    Role,
    Writer,
    is_earlier_data_plane,
    next_data_plane,
)
from dualpath.core.control import Register
from dualpath.core.errors import BadRequestError, EngineRefusedError
from dualpath.core.sessions import Event
from dualpath.core.weights import checked_version, weights_version
from dualpath.router.scheduler.registry import Registry

NONCE = "0123456789abcdef"
STEP_1, STEP_2 = weights_version("step-1", NONCE), weights_version("step-2", NONCE)
LOADED = msgspec.UNSET


def hello(
    engine_id: str, weights: str | msgspec.UnsetType = LOADED, epoch: str = "", role=Role.PREFILL
) -> Register:
    made = FakeEngine(engine_id, role, set()).hello()
    process = HostProcess("host", 7, 9)
    address = msgspec.structs.replace(
        made.address, epoch=epoch or f"{engine_id}-process", process=process
    )
    namespace = made.namespace.with_weights(weights)
    return msgspec.structs.replace(made, address=address, namespace=namespace)


def join(registry: Registry, message: Register) -> Event:
    admission = registry.admit(message)
    assert admission is not None
    admission.engine.machine.on(admission.event)
    admission.engine.machine.on(Event.GROUP_COMPLETE)
    return admission.event


def leave(registry: Registry, engine_id: str) -> None:
    state = registry.get(engine_id)
    assert state is not None
    state.machine.on(Event.DEREGISTERED)


def test_an_engine_with_other_weights_is_refused_while_others_have_a_session() -> None:
    registry = Registry()
    join(registry, hello("p0"))
    join(registry, hello("p1"))
    leave(registry, "p0")
    with pytest.raises(EngineRefusedError, match=r"step-1.* the weights it was started with; upd"):
        registry.admit(hello("p0", STEP_1, "p0-process.2"))
    assert registry.outdated["p0"].namespace.weights == STEP_1
    assert registry.weights is LOADED


def test_the_first_engine_after_all_have_left_decides_the_weights() -> None:
    registry = Registry()
    for name in ("p0", "p1"):
        join(registry, hello(name))
    for name in ("p0", "p1"):
        leave(registry, name)
    join(registry, hello("p0", STEP_1, "p0-process.2"))
    assert registry.weights == STEP_1
    # One that was restarted has the weights of its model's files.
    with pytest.raises(EngineRefusedError, match="the weights it was started with, this cluster"):
        registry.admit(hello("p1", epoch="p1-restarted"))
    join(registry, hello("p1", STEP_1, "p1-restarted.2"))
    assert not registry.outdated


def test_required_weights_outlast_the_engines_that_had_them() -> None:
    registry = Registry()
    join(registry, hello("p0"))
    assert [state.info.engine_id for state in registry.require_weights(STEP_1)] == ["p0"]
    assert registry.require_weights(STEP_1) == []
    leave(registry, "p0")
    with pytest.raises(EngineRefusedError, match="update"):
        registry.admit(hello("p0", epoch="p0-restarted"))
    join(registry, hello("p0", STEP_1, "p0-process.2"))


def test_the_next_data_plane_of_a_process_proves_that_the_former_one_is_over() -> None:
    registry = Registry()
    first = hello("p0")
    join(registry, first)
    state = registry.get("p0")
    assert state is not None
    state.machine.on(Event.SILENT)  # Its deregistration was lost.
    second = hello("p0", LOADED, next_data_plane(first.address.epoch))
    assert join(registry, second) is Event.RESTARTED
    assert registry.is_dead(first.address.writer)
    assert registry.unproven() == []
    # A router that started later has not seen the first one.
    assert not registry.is_dead(Writer("p0", "p0-other", HostProcess("host", 8, 1)))
    assert registry.is_dead(Writer("p0", first.address.epoch, HostProcess("host", 7, 9)))
    assert not registry.is_dead(Writer("p0", "p0-process.3", HostProcess("host", 7, 9)))


def test_a_late_registration_of_a_former_data_plane_is_dropped() -> None:
    registry = Registry()
    join(registry, hello("p0", epoch="p0-process.2"))
    assert registry.admit(hello("p0")) is None
    leave(registry, "p0")
    assert registry.admit(hello("p0")) is None


def test_a_late_or_refused_registration_does_not_decide_the_weights() -> None:
    registry = Registry()
    join(registry, hello("p0", STEP_2, "p0-process.3"))
    # Sent before the weights changed, and overtaken by the registration above.
    assert registry.admit(hello("p0", STEP_1, "p0-process.2")) is None
    assert registry.weights == STEP_2
    join(registry, hello("p0", STEP_2, "p0-replacement"))
    with pytest.raises(EngineRefusedError, match="one process at a time"):
        registry.admit(hello("p0", STEP_1, "p0-process.4"))
    with pytest.raises(EngineRefusedError, match="mode"):
        registry.admit(msgspec.structs.replace(hello("p0", STEP_1, "p0-next"), mode="basic"))
    assert registry.weights == STEP_2
    with pytest.raises(EngineRefusedError, match="step-1"):
        registry.admit(hello("p1", STEP_1))


def test_a_replaced_process_stays_refused_with_its_next_data_plane() -> None:
    registry = Registry()
    join(registry, hello("p0"))
    join(registry, hello("p0", epoch="p0-replacement"))
    with pytest.raises(EngineRefusedError, match="one process at a time"):
        registry.admit(hello("p0", epoch="p0-process.2"))


@pytest.mark.parametrize("text", ["", "7", "step-7", f"-{NONCE}", f"a b-{NONCE}", f"s-{NONCE}\n"])
def test_a_version_that_other_weights_may_have_had_is_refused(text: str) -> None:
    with pytest.raises(BadRequestError, match="16 hex digits"):
        checked_version(text)


def test_a_label_of_other_characters_is_refused() -> None:
    with pytest.raises(BadRequestError, match="letters, digits"):
        weights_version("step 7", NONCE)
    with pytest.raises(BadRequestError, match="1 to 64"):
        weights_version("x" * 65, NONCE)


def test_only_a_lower_number_of_the_same_process_is_an_earlier_data_plane() -> None:
    first = "f00d"
    second, third = next_data_plane(first), next_data_plane(next_data_plane(first))
    assert is_earlier_data_plane(first, second)
    assert is_earlier_data_plane(second, third)
    assert not is_earlier_data_plane(third, second)
    assert not is_earlier_data_plane(second, second)
    assert not is_earlier_data_plane(first, "beef.2")


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["p0", "d0"]),
        st.sampled_from(["join", "resend", "leave", "lost", "require"]),
        st.sampled_from([LOADED, STEP_1, STEP_2]),
    ),
    max_size=40,
)


@given(EVENTS)
@example([("p0", "join", STEP_1), ("p0", "join", STEP_2), ("p0", "resend", STEP_1)])
def test_engines_with_a_session_never_have_different_weights(events) -> None:
    registry = Registry()
    planes: dict[str, int] = {}
    weights_of: dict[str, str | msgspec.UnsetType] = {}
    sent: dict[str, list[Register]] = {}
    for name, event, weights in events:
        state = registry.get(name)
        if event == "resend":
            # The first registration that was sent with these weights arrives again, late.
            for message in sent.get(name, ()):
                if message.namespace.weights == weights:
                    with contextlib.suppress(EngineRefusedError):
                        if (admission := registry.admit(message)) is not None:
                            admission.engine.machine.on(admission.event)
                            weights_of[name] = weights
                    break
        elif event == "join":
            planes[name] = planes.get(name, 0) + 1
            epoch = f"{name}-process.{planes[name]}"
            role = Role.DECODE if name == "d0" else Role.PREFILL
            message = msgspec.structs.replace(hello(name, weights, epoch, role), group=role.value)
            sent.setdefault(name, []).append(message)
            try:
                join(registry, message)
            except EngineRefusedError:
                continue
            weights_of[name] = weights
        elif event == "require" and registry.namespace is not None:
            for taken_out in registry.require_weights(weights):
                taken_out.machine.on(Event.FAILED)
        elif state is not None:
            state.machine.on(Event.DEREGISTERED if event == "leave" else Event.SILENT)
        present = {s.info.engine_id for s in registry.all() if s.present}
        assert {weights_of[name] for name in present} <= {registry.weights}
