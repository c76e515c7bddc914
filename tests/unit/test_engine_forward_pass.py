"""Forward passes as all kinds of engines run them: transfers, failures, reports."""

from collections.abc import Iterator, Sequence

import pytest
from tests.engine_harness import GEOMETRY, ToyCluster, prompt_keys

from dualpath.core.control import Message, PrefillDone, Release
from dualpath.core.modes import Mode
from dualpath.core.runs import BlockRun
from dualpath.core.transfers import PrefillTransfer
from dualpath.engine.counters import Counter
from dualpath.engine.passes.forward_pass import ForwardPass
from dualpath.engine.passes.step_transfers import PrefillChunk

TOKENS = 3 * GEOMETRY.block_tokens
BLOCKS = 3


@pytest.fixture
def cluster() -> Iterator[ToyCluster]:
    made = ToyCluster()
    yield made
    made.close()


def part(transfer: PrefillTransfer, chunk: BlockRun, number: int = 0) -> PrefillChunk:
    """``number`` separates the HBM of several requests."""
    return PrefillChunk(transfer, chunk, tuple(range(number * BLOCKS, (number + 1) * BLOCKS)))


def run(
    cluster: ToyCluster, *parts: PrefillChunk, drafts: Sequence[int] = (), **wrong: str
) -> tuple[dict[str, str], list[str]]:
    """Run a pass; return failures, and the requests reported as ended.

    ``drafts`` are layers computed again after all, as those of a draft model are.
    """
    sent: list[Message] = []
    forward = ForwardPass(cluster.pe.manager, sent.append, parts)
    for layer in (*range(GEOMETRY.layers), *drafts):
        forward.wait_loaded(layer)
        forward.computed(layer)
    failures = forward.finish(wrong)
    done = [message for message in sent if isinstance(message, PrefillDone)]
    assert {d.request_id: d.failure for d in done if d.failure} == failures
    return failures, [d.request_id for d in done]


def moved_bytes(cluster: ToyCluster) -> float:
    return cluster.pe.report().counters[Counter.PE_TO_DE_BYTES.value]


def test_a_prefill_is_confirmed_with_its_last_chunk(cluster: ToyCluster) -> None:
    transfer = cluster.load("r", prompt_keys(TOKENS), TOKENS, 0, 0)
    assert run(cluster, part(transfer, BlockRun(0, 2))) == ({}, [])
    assert run(cluster, part(transfer, BlockRun(2, 1))) == ({}, ["r"])
    assert moved_bytes(cluster) == BLOCKS * GEOMETRY.full_block_bytes


def pass_with_silence(
    cluster: ToyCluster, *parts: PrefillChunk, unwaited: Sequence[int] = (), silent: Sequence[int]
) -> dict[str, str]:
    """Run a pass of a model that does not announce some layers, or does not wait for their KV."""
    forward = ForwardPass(cluster.pe.manager, lambda message: None, parts)
    for layer in range(GEOMETRY.layers):
        if layer not in (*unwaited, *silent):
            forward.wait_loaded(layer)
        if layer not in silent:
            forward.computed(layer)
    return forward.finish({})


@pytest.mark.parametrize("buffers", [1, 2, 0])
def test_a_layer_that_did_not_wait_for_its_kv_fails_the_pass_and_is_not_sent(buffers: int) -> None:
    """Its attention may have read whatever was in HBM; nothing of it may reach anybody."""
    cluster = ToyCluster(layer_buffers=buffers)
    keys = prompt_keys(TOKENS)
    cluster.store(keys[:2])
    transfer = cluster.load("r", keys, TOKENS, 2, 0)
    failures = pass_with_silence(cluster, part(transfer, BlockRun(2, 1)), unwaited=[1], silent=[])
    assert "layer 1 is computed without a wait" in failures["r"]
    assert moved_bytes(cluster) <= BLOCKS * GEOMETRY.bytes_of(0)
    again = cluster.load("s", keys, TOKENS, 2, 0)
    assert run(cluster, part(again, BlockRun(2, 1))) == ({}, ["s"])
    cluster.close()


@pytest.mark.parametrize("how", ["unwaited", "silent"])
def test_an_engine_with_a_model_that_bypasses_the_connector_is_broken(
    cluster: ToyCluster, how: str
) -> None:
    """Its next passes would fail likewise: it must get no more and report the reason."""
    assert cluster.pe.report().unhealthy is None
    transfer = cluster.load("r", prompt_keys(TOKENS), TOKENS, 0, 0)
    layers: dict[str, list[int]] = {"silent": [], how: [1]}
    failures = pass_with_silence(cluster, part(transfer, BlockRun(0, BLOCKS)), **layers)
    assert "layer 1" in failures["r"]
    assert "does not call the connector" in failures["r"]
    assert cluster.pe.report().unhealthy == cluster.pe.manager.broken == failures["r"]


def test_a_layer_skipped_in_one_pass_fails_only_that_pass(cluster: ToyCluster) -> None:
    """As vLLM skips draft layers when a prompt is near the end of their context."""
    whole, last = BlockRun(0, BLOCKS), GEOMETRY.layers - 1
    for number, silent in enumerate(([], [last], [])):
        transfer = cluster.load(f"r{number}", prompt_keys(TOKENS, str(number)), TOKENS, 0, 0)
        failures = pass_with_silence(cluster, part(transfer, whole), silent=silent)
        assert list(failures) == ([f"r{number}"] if silent else [])
    assert cluster.pe.report().unhealthy is None


@pytest.mark.parametrize("buffers", [1, 2, 0])
@pytest.mark.parametrize("silent", [[0], [1], [GEOMETRY.layers - 1], range(GEOMETRY.layers)])
def test_a_model_that_does_not_announce_a_layer_fails_its_passes_without_hanging(
    silent: Sequence[int], buffers: int
) -> None:
    """Loads and sends of other layers wait for the region of a layer that is not announced."""
    cluster = ToyCluster(layer_buffers=buffers)
    keys = prompt_keys(TOKENS)
    cluster.store(keys[:2])
    transfer = cluster.load("r", keys, TOKENS, 2, 0)
    failures = pass_with_silence(cluster, part(transfer, BlockRun(2, 1)), silent=silent)
    assert f"layer {silent[0]} is computed without" in failures["r"]
    cluster.close()


@pytest.mark.parametrize("mode", [Mode.DUALPATH, Mode.BASIC])
@pytest.mark.parametrize("draft_layers", [1, 2])
@pytest.mark.parametrize("tokens_proposed", [1, 2, 5])
def test_a_draft_models_layers_are_sent_once_however_many_tokens_it_proposes(
    mode: Mode, draft_layers: int, tokens_proposed: int
) -> None:
    again = [*range(GEOMETRY.layers - draft_layers, GEOMETRY.layers)] * (tokens_proposed - 1)
    cluster = ToyCluster(mode=mode)
    try:
        keys = prompt_keys(TOKENS)
        cluster.store(keys[:1])
        transfer = cluster.load("r", keys, TOKENS, 1, 0)
        first = part(transfer, BlockRun(1, 1))
        assert run(cluster, first, drafts=again) == ({}, [])
        assert run(cluster, part(transfer, BlockRun(2, 1)), drafts=again) == ({}, ["r"])
        assert moved_bytes(cluster) == BLOCKS * GEOMETRY.full_block_bytes
        counters = cluster.pe.report().counters
        assert counters[Counter.TRANSFER_FAILURES.value] == 0
    finally:
        cluster.close()


def test_a_request_released_before_its_pass_is_reported_and_the_others_are_sent(
    cluster: ToyCluster,
) -> None:
    gone = cluster.load("gone", prompt_keys(TOKENS), TOKENS, 0, 0)
    here = cluster.load("here", prompt_keys(TOKENS, "other"), TOKENS, 0, 0)
    cluster.pe.command(Release(request_id="gone", reason="client left"))
    whole = BlockRun(0, BLOCKS)
    failures, ended = run(cluster, part(gone, whole), part(here, whole, 1))
    assert failures == {"gone": "request gone: it was released"}
    assert ended == ["gone", "here"]
    assert moved_bytes(cluster) == BLOCKS * GEOMETRY.full_block_bytes


@pytest.mark.parametrize("how", ["release", "session over"])
def test_what_a_pass_loads_for_a_request_after_its_release_is_unusable(
    cluster: ToyCluster, how: str
) -> None:
    """The router has lost this engine: the DE reuses the slots of the hits that the pass loads."""
    keys = prompt_keys(TOKENS)
    cluster.store(keys[:2])
    transfer = cluster.load("r", keys, TOKENS, 0, 2)
    sent: list[Message] = []
    forward = ForwardPass(cluster.pe.manager, sent.append, [part(transfer, BlockRun(2, 1))])
    for layer in range(GEOMETRY.layers):
        if layer == 1 and how == "release":
            cluster.pe.command(Release(request_id="r", reason="the client left"))
        elif layer == 1:
            cluster.pe.manager.end_session("the router was silent")
        forward.wait_loaded(layer)
        assert forward.failed("r") is (layer > 0)
        forward.computed(layer)
    assert forward.finish({"r": "wrong in pe_hbm"}) == {"r": "it was released"}
    (done,) = (message for message in sent if isinstance(message, PrefillDone))
    assert done.failure == "it was released"


def test_slots_of_another_request_are_not_loaded(cluster: ToyCluster) -> None:
    keys = prompt_keys(TOKENS)
    cluster.store(keys[:2])
    transfer = cluster.load("r", keys, TOKENS, 2, 0)
    cluster.pe.command(Release(request_id="r", reason="retried"))
    cluster.pe.assign("r", TOKENS, 0)
    failures, _ = run(cluster, part(transfer, BlockRun(2, 1)))
    assert failures == {"r": "request r: its buffer slots have a new owner"}
    counters = cluster.pe.report().counters
    assert counters[Counter.STALE_TRANSFERS.value] == 1
    assert counters[Counter.H2D_BYTES.value] == 0


def test_wrong_kv_found_by_the_engine_fails_the_request_in_any_chunk(cluster: ToyCluster) -> None:
    transfer = cluster.load("r", prompt_keys(TOKENS), TOKENS, 0, 0)
    assert run(cluster, part(transfer, BlockRun(0, 1)), r="wrong in pe_hbm") == (
        {"r": "wrong in pe_hbm"},
        ["r"],
    )


def compute(forward: ForwardPass, layers: Sequence[int]) -> None:
    for layer in layers:
        forward.wait_loaded(layer)
        forward.computed(layer)


def test_a_pass_begins_in_the_one_before_and_both_are_confirmed_in_their_order() -> None:
    cluster = ToyCluster(layer_buffers=2)
    try:
        sent: list[Message] = []
        keys = prompt_keys(TOKENS), prompt_keys(TOKENS, "other")
        cluster.store(keys[1][:2])
        one = cluster.load("one", keys[0], TOKENS, 0, 0)
        other = cluster.load("other", keys[1], TOKENS, 2, 0)
        layers = range(GEOMETRY.layers)
        first = ForwardPass(cluster.pe.manager, sent.append, [part(one, BlockRun(0, 2))])
        compute(first, layers[:-2])
        parts = [part(one, BlockRun(2, 1)), part(other, BlockRun(2, 1), 1)]
        second = ForwardPass(cluster.pe.manager, sent.append, parts, first)
        compute(first, layers[-2:])
        second.enter()
        compute(second, layers[:2])
        assert first.finish({}) == {}
        assert sent == []
        compute(second, layers[2:])
        assert second.finish({}) == {}
        confirmed = [(d.request_id, d.failure) for d in sent if isinstance(d, PrefillDone)]
        assert confirmed == [("one", None), ("other", None)]
        assert moved_bytes(cluster) == 2 * BLOCKS * GEOMETRY.full_block_bytes
    finally:
        cluster.close()


def test_a_failure_in_the_pass_before_fails_the_next_pass_and_is_reported_once() -> None:
    """A transfer of the first chunk fails; the next one had begun and cannot be right."""
    cluster = ToyCluster(layer_buffers=2)
    try:
        sent: list[Message] = []
        lost = cluster.load("lost", prompt_keys(TOKENS), TOKENS, 0, 0)
        well = cluster.load("well", prompt_keys(TOKENS, "other"), TOKENS, 0, 0)
        layers = range(GEOMETRY.layers)
        first = ForwardPass(cluster.pe.manager, sent.append, [part(lost, BlockRun(0, 2))])
        parts = [part(lost, BlockRun(2, 1)), part(well, BlockRun(0, BLOCKS), 1)]
        second = ForwardPass(cluster.pe.manager, sent.append, parts, first)
        cluster.fabric.fail_next("lost on the way")
        compute(first, layers)
        second.enter()
        compute(second, layers)
        failed = first.finish({})
        assert set(failed) == {"lost"}
        assert second.finish({}) == failed
        done = [(d.request_id, bool(d.failure)) for d in sent if isinstance(d, PrefillDone)]
        assert done == [("lost", True), ("well", False)]
    finally:
        cluster.close()


def test_a_pass_with_unannounced_layers_ends_though_the_next_one_has_begun() -> None:
    """The next pass waits for a layer that will not be announced."""
    cluster = ToyCluster(layer_buffers=2)
    try:
        one = cluster.load("one", prompt_keys(TOKENS), TOKENS, 0, 0)
        other = cluster.load("other", prompt_keys(TOKENS, "other"), TOKENS, 0, 0)
        whole, layers = BlockRun(0, BLOCKS), range(GEOMETRY.layers)
        first = ForwardPass(cluster.pe.manager, lambda message: None, [part(one, whole)])
        second = ForwardPass(
            cluster.pe.manager, lambda message: None, [part(other, whole, 1)], first
        )
        compute(first, layers[:-1])
        second.enter()
        compute(second, layers)
        assert f"layer {layers[-1]} is computed without" in first.finish({})["one"]
        assert second.finish({}) == {}
    finally:
        cluster.close()


def test_without_transfers_a_pass_only_confirms() -> None:
    cluster = ToyCluster(mode=Mode.ORACLE)
    try:
        transfer = PrefillTransfer(
            request_id="r",
            prompt_tokens=TOKENS,
            hit_blocks=0,
            hit_key_tail=b"",
            hits=(),
            decode_engine="de-0",
            decode_epoch="unknown",
            de_slots=(),
        )
        whole = BlockRun(0, BLOCKS)
        assert run(cluster, part(transfer, whole))[0] == {"r": "request r: it was released"}
        cluster.pe.assign("r", TOKENS, 0)
        assert run(cluster, part(transfer, whole)) == ({}, ["r"])
    finally:
        cluster.close()
