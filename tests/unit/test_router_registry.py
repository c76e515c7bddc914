"""What the router remembers of engines: those that live, and nothing of those that are gone."""

import msgspec
import pytest
from tests.unit.router_fakes import FakeEngine

from dualpath.core.cluster import GroupRank, Role, Writer
from dualpath.core.errors import EngineRefusedError
from dualpath.core.modes import Handover, Mode
from dualpath.core.sessions import Event
from dualpath.router.scheduler import registry as registry_module
from dualpath.router.scheduler.registry import Registry


def admit(registry: Registry, engine_id: str, role: Role = Role.PREFILL, **limits: int) -> None:
    register(registry, FakeEngine(engine_id, role, set(), limits=limits))


def register(registry: Registry, engine: FakeEngine) -> None:
    admission = registry.admit(engine.hello())
    assert admission is not None
    admission.engine.machine.on(admission.event)
    admission.engine.machine.on(Event.GROUP_COMPLETE)


def lose(registry: Registry, engine_id: str) -> None:
    state = registry.get(engine_id)
    assert state is not None
    state.machine.on(Event.SILENT)


async def test_a_lost_engine_limits_no_other() -> None:
    registry = Registry()
    admit(registry, "large", max_model_len=1000)
    admit(registry, "small", max_model_len=128)
    assert registry.limit("max_model_len") == 128
    lose(registry, "small")
    assert registry.limit("max_model_len") == 1000
    lose(registry, "large")
    assert registry.limit("max_model_len") is None


@pytest.mark.parametrize("value", [0, -1])
async def test_a_limit_that_nothing_fits_is_refused(value: int) -> None:
    registry = Registry()
    with pytest.raises(EngineRefusedError, match=f"max_model_len {value}; it must be at least 1"):
        admit(registry, "wrong", max_model_len=value)
    assert registry.limit("max_model_len") is None


async def test_the_group_of_a_lost_engine_may_change_its_role() -> None:
    registry = Registry()
    admit(registry, "p0")
    joining = FakeEngine("d0", Role.DECODE, set())
    hello = msgspec.structs.replace(joining.hello(), group="prefill group")
    with pytest.raises(EngineRefusedError, match="holds the prefill engine 'p0'"):
        registry.admit(hello)
    lose(registry, "p0")
    admission = registry.admit(hello)
    assert admission is not None
    assert admission.event is Event.REGISTERS


@pytest.mark.parametrize(
    ("given", "rank", "fetches_with"),
    [
        ("prefill", None, "prefill@node-7"),
        ("fast", None, "fast"),
        ("prefill", GroupRank("pe-3", "1", 0, 2), "prefill@pe-3"),
    ],
    ids=["a node's engines", "a group that was given", "a data-parallel group on several nodes"],
)
async def test_by_node_the_engines_of_a_node_and_role_fetch_together(
    given: str, rank: GroupRank | None, fetches_with: str
) -> None:
    registry = Registry(by_node=True)
    hello = FakeEngine("p0", Role.PREFILL, set()).hello()
    hello = msgspec.structs.replace(hello, group=given, node="node-7", dp=rank)
    admission = registry.admit(hello)
    assert admission is not None
    assert admission.engine.info.group == fetches_with


async def test_a_node_may_have_engines_of_both_roles() -> None:
    registry = Registry(by_node=True)
    for engine_id, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
        hello = FakeEngine(engine_id, role, set()).hello()
        registry.admit(msgspec.structs.replace(hello, group=role.value, node="node-7"))
    assert {engine.info.group for engine in registry.all()} == {"prefill@node-7", "decode@node-7"}


async def test_a_replaced_process_may_return_once_its_successor_is_lost() -> None:
    registry = Registry()
    first, second = FakeEngine("p0", Role.PREFILL, set()), FakeEngine("p0", Role.PREFILL, set())
    second.generation = first.generation + 1
    register(registry, first)
    register(registry, second)
    with pytest.raises(EngineRefusedError, match="one process at a time"):
        registry.admit(first.hello())

    lose(registry, "p0")
    register(registry, first)
    assert registry.alive(Role.PREFILL)[0].epoch == first.epoch
    # It was here before: that it is here now does not say that the other one has ended.
    assert not registry.is_dead(second.hello().address.writer)
    with pytest.raises(EngineRefusedError, match="one process at a time"):
        registry.admit(second.hello())


async def test_an_engine_without_the_others_draft_model_gets_an_error_about_speculation() -> None:
    """A draft's layers are layers of every block."""
    registry = Registry()
    hello = FakeEngine("drafts", Role.DECODE, set()).hello()
    registry.admit(hello)
    own = hello.namespace.geometry
    parts, windows = (*own.layer_parts, own.layer_parts[-1]), (*own.layer_windows, 0)
    geometry = msgspec.structs.replace(own, layer_parts=parts, layer_windows=windows)
    namespace = msgspec.structs.replace(hello.namespace, geometry=geometry)
    without = FakeEngine("drafts-not", Role.PREFILL, set()).hello()
    with pytest.raises(
        EngineRefusedError, match=r"geometry\.layer_parts = .* --speculative-config"
    ):
        registry.admit(msgspec.structs.replace(without, namespace=namespace))


async def test_a_refusal_names_what_differs_in_a_geometry_of_many_layers_in_few_words() -> None:
    registry = Registry()
    hello = FakeEngine("a", Role.DECODE, set()).hello()
    layers = tuple((4096, 4096, 128) for _ in range(200))
    many = msgspec.structs.replace(hello.namespace.geometry, layer_parts=layers, layer_windows=())
    namespace = msgspec.structs.replace(hello.namespace, geometry=many)
    registry.admit(msgspec.structs.replace(hello, namespace=namespace))
    other = FakeEngine("b", Role.PREFILL, set()).hello()
    changed = (*layers[:150], (4096, 4096, 64), *layers[151:])
    geometry = msgspec.structs.replace(many, layer_parts=changed, block_tokens=7)
    namespace = msgspec.structs.replace(namespace, geometry=geometry, dtype="x" * 900)
    with pytest.raises(EngineRefusedError) as refused:
        registry.admit(msgspec.structs.replace(other, namespace=namespace))
    message = str(refused.value)
    assert "geometry.block_tokens = 7 where this router has " in message
    assert "geometry.layer_parts[150][2] = 64 where this router has 128" in message
    assert len(message) < 600


async def test_of_lost_engines_only_the_last_are_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer can invent any number of names at no cost."""
    monkeypatch.setattr(registry_module, "MOST_FORMER_ENGINES", 3)
    registry = Registry()
    admit(registry, "lives")
    for number in range(10):
        admit(registry, f"p{number}")
        state = registry.get(f"p{number}")
        assert state is not None
        state.heard_s = number
        lose(registry, f"p{number}")
    admit(registry, "last")
    assert [e.info.engine_id for e in registry.all()] == ["lives", "p7", "p8", "p9", "last"]
    orders = [e.info.order for e in registry.all()]
    assert orders == sorted(set(orders))
    assert not registry.is_dead(Writer("p0", "p0-0"))


async def test_no_more_engines_may_live_than_a_router_can_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry_module, "MOST_ENGINES", 2)
    registry = Registry()
    admit(registry, "p0")
    admit(registry, "p1")
    with pytest.raises(EngineRefusedError, match="'p2' would be one more than 2 engines"):
        admit(registry, "p2")
    lose(registry, "p0")
    admit(registry, "p2")


@pytest.mark.parametrize("mode", [Mode.DUALPATH, Mode.BASIC])
async def test_an_engine_that_cannot_hand_over_in_hbm_is_refused_where_that_is_done(
    mode: Mode,
) -> None:
    hello = FakeEngine("d0", Role.DECODE, set()).hello()
    geometry = msgspec.structs.replace(hello.namespace.geometry, layer_windows=())
    hello = msgspec.structs.replace(
        hello,
        mode=mode.value,
        namespace=msgspec.structs.replace(hello.namespace, geometry=geometry),
        hbm_refusal="it has 2 ranks",
    )
    assert Registry(mode).admit(hello) is not None
    registry = Registry(mode, handover=Handover.AUTO)
    if mode is Mode.BASIC:
        assert registry.admit(hello) is not None, "baselines use the buffer"
        return
    with pytest.raises(EngineRefusedError, match="it has 2 ranks; or start the router with"):
        registry.admit(hello)
    able = msgspec.structs.replace(hello, hbm_refusal="")
    assert registry.admit(able) is not None
