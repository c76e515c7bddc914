"""vLLM 0.32 internals that the engine plugin uses; an upgrade that changes one fails here.

Those that the front end uses are tested by ``test_frontend_vllm_interface.py``.
"""

import inspect
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from tests.vllm_caches import cache_of, full_attention  # isort: skip

from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import KVTransferConfig, ParallelConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import utils as engine_processes
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor
from vllm.v1.request import Request

from dualpath.core.blocks import CHAIN_SEED, BlockGeometry, block_keys, chain_root
from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.core.runs import BlockRun, HitRun
from dualpath.core.transfers import (
    DecodeTransfer,
    PrefillTransfer,
    prompt_digest,
    to_transfer_params,
)
from dualpath.engine.settings import EngineSettings
from dualpath.policy.batching import AttentionGeometry, LayerTimeEstimate
from dualpath.vllm.cache_layers import CacheGroups, max_drafted_prompt_tokens
from dualpath.vllm.connector import DualPathConnector, check_engine_config, settings_of
from dualpath.vllm.layerwise_worker import LayerwiseWorker, place_in_regions
from dualpath.vllm.metadata import HeldBlocks, HeldBlocksMetadata
from dualpath.vllm.pass_costs import BesidesAttention, PassCosts
from dualpath.vllm.quota_scheduler import QuotaScheduler
from dualpath.vllm.scheduler_side import SchedulerSide
from dualpath.vllm.worker_side import WorkerSide

BLOCK_TOKENS = 16
GEOMETRY = BlockGeometry.uniform(layers=2, block_tokens=BLOCK_TOKENS, layer_block_bytes=1024)
GROUPS = CacheGroups(BLOCK_TOKENS, (None,), 1024)
SETTINGS = EngineSettings(
    role=Role.PREFILL, engine_id="pe-0", router="tcp://h:1", api_url="http://h:2", storage="s",
    layer_buffers=0,
)  # fmt: skip


def parameters(function):
    return list(inspect.signature(function).parameters)


def own_functions(cls):
    return {name for name, value in vars(cls).items() if callable(value) and name[:2] != "__"}


# ------------------------------------------------------------------ scheduler


def test_the_quota_hook_is_called_with_computed_and_new_tokens():
    assert parameters(Scheduler._reserve_prefill_lookahead) == [
        "self", "request", "num_computed_tokens", "num_new_tokens",
    ]  # fmt: skip
    assert parameters(QuotaScheduler._reserve_prefill_lookahead) == parameters(
        Scheduler._reserve_prefill_lookahead
    )


def test_the_quota_hook_is_called_for_running_and_for_waiting_requests():
    source = inspect.getsource(Scheduler.schedule)
    running, _, waiting = source.partition("self.waiting")
    assert running.count("self._reserve_prefill_lookahead(") == 1
    assert waiting.count("self._reserve_prefill_lookahead(") == 1


@pytest.mark.parametrize("handover", ["hbm", "buffer"])
@pytest.mark.parametrize("measured", [True, False])
def test_a_request_that_is_received_in_hbm_waits_if_the_step_would_load_too_long(
    handover, measured, monkeypatch
):
    """Six requests load 48 tokens each, of which the worker needs a millisecond for each."""
    keys = block_keys(list(range(5 * BLOCK_TOKENS)), BLOCK_TOKENS)
    scheduler, requests = quota_scheduler(measured, monkeypatch), []
    side = scheduler.connector.scheduler_side
    for number in range(6):
        transfer = prefill_transfer(3, keys[2])
        if handover == "hbm":
            transfer = msgspec.structs.replace(transfer, de_slots=(), de_hbm_blocks=(1, 2, 3, 4, 5))
        transfer = _json(to_transfer_params(transfer))
        requests.append(vllm_request(range(5 * BLOCK_TOKENS), transfer=transfer))
        requests[-1].request_id = f"r{number}"
        assert side.matched_tokens(requests[-1], 0) == (3 * BLOCK_TOKENS, False)
    waiting = list(requests)

    def schedule(self):
        admitted = []
        while waiting and self._reserve_prefill_lookahead(waiting[0], 3 * BLOCK_TOKENS, 32) == 32:
            admitted.append(waiting.pop(0).request_id)
        scheduled = SchedulerOutput.make_empty()
        scheduled.num_scheduled_tokens = dict.fromkeys(admitted, 32)
        return scheduled

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    assert len(scheduler.schedule().num_scheduled_tokens) == 6, "the speed of loads is not known"
    waiting += requests
    side.update_held_blocks(HeldBlocksMetadata([], [], load_token_s=1e-3))
    steps = [list(scheduler.schedule().num_scheduled_tokens) for _ in range(4)]
    if handover == "hbm" and measured:
        assert steps == [["r0", "r1"], ["r2", "r3"], ["r4", "r5"], []]
    else:
        assert steps[0] == [f"r{number}" for number in range(6)]


def quota_scheduler(measured, monkeypatch):
    """Return the scheduler of a prefill engine whose passes take no time besides loads."""
    costs = PassCosts(LayerTimeEstimate(0.0, 1e12), 1000.0, 2.0)
    if measured:
        costs = msgspec.structs.replace(costs, besides_attention=BesidesAttention(0.0, 1e-6))
    connector = object.__new__(DualPathConnector)
    connector.costs = costs
    connector._scheduler = SchedulerSide(SETTINGS, GEOMETRY, GROUPS)
    connector._scheduler.bind_block_pool(BlockPool(64, False, BLOCK_TOKENS))
    scheduler = object.__new__(QuotaScheduler)
    scheduler.connector, scheduler._quota = connector, None
    scheduler.vllm_config, scheduler.block_size = None, BLOCK_TOKENS
    quota = "dualpath.vllm.quota_scheduler."
    monkeypatch.setattr(quota + "settings_of", lambda config: SETTINGS)
    monkeypatch.setattr(quota + "attention_geometry", lambda config: AttentionGeometry(1.0))
    monkeypatch.setattr(
        Scheduler, "_reserve_prefill_lookahead", lambda self, request, computed, new: new
    )
    return scheduler


def test_the_worker_reports_a_changed_time_of_loads_once():
    """It is that of the cluster that the engine has joined; outside a cluster nothing is loaded."""
    side: Any = object.__new__(WorkerSide)
    side._held, side._reported_load_token_s = HeldBlocks(), 0.0
    side._membership = SimpleNamespace(manager=SimpleNamespace(load_token_s=0.0))
    assert side.take_held_blocks() is None
    side._membership.manager.load_token_s = 2e-6
    assert side.take_held_blocks().load_token_s == 2e-6
    assert side.take_held_blocks() is None
    side._held.hold((7,))
    held = side.take_held_blocks()
    assert (held.held, held.load_token_s) == ([7], None)
    side._membership = None
    assert side.take_held_blocks().load_token_s == 0.0
    other = HeldBlocksMetadata([], [], load_token_s=3e-6)
    assert held.aggregate(other).load_token_s == other.aggregate(held).load_token_s == 3e-6


def test_the_schedule_has_what_the_connector_reads_of_it():
    read = {
        SchedulerOutput: {"scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens"},
        NewRequestData: {"req_id", "num_computed_tokens"},
        CachedRequestData: {"req_ids", "new_block_ids", "num_computed_tokens", "resumed_req_ids"},
    }
    for cls, names in read.items():
        assert names <= set(cls.__dataclass_fields__)


# ------------------------------------------------------------------ connector


def test_every_function_the_connector_overrides_is_still_there():
    inherited = {name for base in (KVConnectorBase_V1, SupportsHMA) for name in vars(base)}
    ours = own_functions(DualPathConnector) | {"requires_kv_delivery"}
    assert ours <= inherited


@pytest.mark.parametrize(
    "name",
    [
        "bind_connector_metadata",
        "bind_gpu_block_pool",
        "build_connector_meta",
        "get_num_new_matched_tokens",
        "get_transfer_results",
        "register_kv_caches",
        "request_finished",
        "save_kv_layer",
        "start_load_kv",
        "update_state_after_alloc",
        "wait_for_layer_load",
    ],
)
def test_overridden_functions_keep_their_parameters(name):
    theirs, ours = getattr(KVConnectorBase_V1, name), getattr(DualPathConnector, name)
    assert parameters(ours) == parameters(theirs)


def test_vllm_asks_for_transfer_results_with_these_fields():
    results = KVConnectorTransferResults(finished_recving={"a"}, failed_recving={"b"})
    assert (results.finished_recving, results.failed_recving) == ({"a"}, {"b"})


# ------------------------------------------------------------------ worker


def test_layers_are_placed_by_offset_and_stride_and_may_overlap():
    assert set(KVCacheTensor.__dataclass_fields__) >= {
        "size", "layers", "layer_stride", "block_stride", "offset",
    }  # fmt: skip
    assert {"num_blocks", "kv_cache_tensors", "kv_cache_groups"} <= set(
        KVCacheConfig.__dataclass_fields__
    )
    layers = [f"layers.{n}.attn" for n in range(5)]
    whole = KVCacheTensor(size=5 * 70, layers=layers, layer_stride=70, block_stride=10, offset=0)
    placed = place_in_regions([whole], num_blocks=7, buffers=2)
    assert [tensor.layers for tensor in placed] == [[layer] for layer in layers]
    assert [tensor.offset for tensor in placed] == [0, 70, 0, 70, 0]
    assert {tensor.size for tensor in placed} == {140}


def test_the_worker_overrides_what_vllm_calls():
    for name in (
        "determine_available_memory",
        "get_kv_cache_spec",
        "initialize_from_config",
        "compile_or_warm_up_model",
    ):
        theirs, ours = getattr(LayerwiseWorker.__base__, name), getattr(LayerwiseWorker, name)
        assert parameters(ours) == parameters(theirs)


def test_engine_cores_are_started_by_the_context_the_launcher_replaces():
    source = inspect.getsource(engine_processes.CoreEngineProcManager.__init__)
    assert "get_mp_context()" in source
    assert "get_mp_context" in vars(engine_processes)


# ------------------------------------------------------------------ block keys


@pytest.fixture(scope="module", autouse=True)
def none_hash():
    """vLLM's root block hash as in an engine: without PYTHONHASHSEED."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONHASHSEED", raising=False)
        kv_cache_utils.init_none_hash(sha256_cbor)


def vllm_request(tokens, salt=None, transfer=None):
    extra = {"kv_transfer_params": transfer} if transfer else None
    return Request(
        request_id="r",
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(max_tokens=40, extra_args=extra),
        pooling_params=None,
        cache_salt=salt,
        block_hasher=kv_cache_utils.get_request_block_hasher(BLOCK_TOKENS, sha256_cbor),
    )


def test_the_chain_begins_where_vllms_does():
    assert kv_cache_utils.DEFAULT_NONE_HASH_SEED == CHAIN_SEED
    assert bytes(kv_cache_utils.NONE_HASH) == chain_root()


@settings(max_examples=50, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 200_000), min_size=1, max_size=5 * BLOCK_TOKENS),
    salt=st.none() | st.text(min_size=1, max_size=8),
)
def test_block_keys_are_vllms_own(tokens, salt):
    theirs = [bytes(key) for key in vllm_request(tokens, salt).block_hashes]
    assert block_keys(tokens, BLOCK_TOKENS, cache_salt=salt) == theirs


def test_generated_tokens_enter_the_keys_as_prompt_tokens_do():
    request = vllm_request(range(BLOCK_TOKENS + 3), "tenant")
    request.append_output_token_ids(list(range(500, 500 + BLOCK_TOKENS)))
    theirs = [bytes(key) for key in request.block_hashes]
    tokens = [*range(BLOCK_TOKENS + 3), *range(500, 500 + BLOCK_TOKENS)]
    assert len(theirs) == 2
    assert block_keys(tokens, BLOCK_TOKENS, cache_salt="tenant") == theirs


def prefill_transfer(hit_blocks, tail):
    return PrefillTransfer(
        request_id="r",
        prompt_tokens=5 * BLOCK_TOKENS,
        hit_blocks=hit_blocks,
        hit_key_tail=tail,
        hits=(HitRun(Role.PREFILL, BlockRun(0, hit_blocks), tuple(range(hit_blocks))),),
        decode_engine="de-0",
        decode_epoch="e",
        de_slots=tuple(range(5)),
    )


def test_a_request_grants_its_hits_only_under_its_own_keys():
    tokens = list(range(5 * BLOCK_TOKENS))
    keys = block_keys(tokens, BLOCK_TOKENS)
    right = vllm_request(tokens, transfer=_json(to_transfer_params(prefill_transfer(3, keys[2]))))
    wrong = vllm_request(tokens, transfer=_json(to_transfer_params(prefill_transfer(3, keys[1]))))
    for request, hit_tokens in ((right, 3 * BLOCK_TOKENS), (wrong, 0)):
        side = SchedulerSide(SETTINGS, GEOMETRY, GROUPS)
        assert side.matched_tokens(request, 0) == (hit_tokens, False)


OTHER_PROMPTS = {
    "its own": (True, lambda request: None, None),
    "another last token": (False, lambda request: None, None),
    "another salt": (False, lambda request: None, "tenant"),
    "an adapter": (False, lambda request: setattr(request, "lora_request", object()), None),
    "an image": (False, lambda request: setattr(request, "mm_features", [object()]), None),
}


@pytest.mark.parametrize("other", OTHER_PROMPTS)
@pytest.mark.parametrize("role", list(Role))
def test_a_leg_uses_kv_of_its_own_prompt_only(role, other):
    """Legs come from other proxies: their names and prompts may not fit each other."""
    fits, change, salt = OTHER_PROMPTS[other]
    tokens = list(range(5 * BLOCK_TOKENS - 3))
    digest = prompt_digest(block_keys(tokens, BLOCK_TOKENS), tokens, BLOCK_TOKENS)
    if role is Role.PREFILL:
        transfer = msgspec.structs.replace(prefill_transfer(0, b""), hits=())
    else:
        transfer = DecodeTransfer("r", 0, tuple(range(5)))
    transfer = msgspec.structs.replace(transfer, prompt_tokens=len(tokens), prompt_digest=digest)
    if other == "another last token":
        tokens[-1] = 0
    request = vllm_request(tokens, salt, _json(to_transfer_params(transfer)))
    change(request)
    side = SchedulerSide(msgspec.structs.replace(SETTINGS, role=role), GEOMETRY, GROUPS)
    loaded, _ = side.matched_tokens(request, 0)
    rejected = side.build(SchedulerOutput.make_empty()).rejected
    if role is Role.PREFILL:
        assert list(rejected) == ([] if fits else ["r"])
    else:
        assert loaded == (len(tokens) if fits else 0), "else it computes the prompt itself"


@pytest.mark.parametrize("role", list(Role))
def test_an_invalid_transfer_grants_no_hit_and_fails_at_a_prefill_engine(role):
    """The engine continues: an exception raised here would end vLLM's scheduler."""
    tokens = list(range(5 * BLOCK_TOKENS))
    keys = block_keys(tokens, BLOCK_TOKENS)
    whole = prefill_transfer(5, keys[4])  # the last token has to be computed
    broken = {"dualpath": {"prefill_transfer": {"request_id": 7}}}
    side = SchedulerSide(msgspec.structs.replace(SETTINGS, role=role), GEOMETRY, GROUPS)
    for number, params in enumerate((_json(to_transfer_params(whole)), broken)):
        request = vllm_request(tokens, transfer=params)
        request.request_id = f"r{number}"
        granted = (1, True) if role is Role.PREFILL else (0, False)
        assert side.matched_tokens(request, 0) == granted
        assert side.matched_tokens(request, 0) == granted
    rejected = side.build(SchedulerOutput.make_empty()).rejected
    assert list(rejected) == (["r"] if role is Role.PREFILL else [])
    assert side.build(SchedulerOutput.make_empty()).rejected == {}


def drafting(method, tokens, context=None):
    """The configuration of an engine with a context of 200 tokens."""
    drafts = SimpleNamespace(
        use_eagle=lambda: method in ("mtp", "dflash"),
        uses_draft_model=lambda: method == "draft_model",
        use_dflash=lambda: method == "dflash",
        num_speculative_tokens=tokens,
        draft_model_config=context and SimpleNamespace(max_model_len=context),
    )
    return SimpleNamespace(
        speculative_config=drafts, model_config=SimpleNamespace(max_model_len=200)
    )


def test_a_prompt_too_long_for_the_draft_model_is_not_computed():
    """vLLM skips the draft model in such a pass, and nothing is reported for its layers."""
    assert max_drafted_prompt_tokens(SimpleNamespace(speculative_config=None)) is None
    assert max_drafted_prompt_tokens(drafting("ngram", 3)) is None
    assert max_drafted_prompt_tokens(drafting("mtp", 3)) == 197
    assert max_drafted_prompt_tokens(drafting("draft_model", 1, 64)) == 63
    assert max_drafted_prompt_tokens(drafting("dflash", 2, 64)) == 61
    tokens = list(range(5 * BLOCK_TOKENS))
    keys = block_keys(tokens, BLOCK_TOKENS)
    for most, rejected in ((len(tokens), []), (len(tokens) - 1, ["r"])):
        side = SchedulerSide(SETTINGS, GEOMETRY, GROUPS, most)
        transfer = _json(to_transfer_params(prefill_transfer(3, keys[2])))
        side.matched_tokens(vllm_request(tokens, transfer=transfer), 0)
        step = side.build(SchedulerOutput.make_empty())
        assert list(step.rejected) == rejected
        assert all(
            "the draft model's context allows at most" in why for why in step.rejected.values()
        )


class Blocks:
    """The KV caches that vLLM allocated."""

    def get_block_ids(self):
        return ([3],)


def test_vllm_fails_requests_without_a_transfer_at_a_prefill_engine():
    """Its layers share regions, so a computation would return garbage with status 200."""
    side = SchedulerSide(SETTINGS, GEOMETRY, GROUPS)
    request = vllm_request(range(5 * BLOCK_TOKENS))
    request.skip_reading_prefix_cache = True  # prompt logprobs: vLLM ignores external tokens
    promised, asynchronously = side.matched_tokens(request, 0)
    assert asynchronously
    assert not request.skip_reading_prefix_cache
    side.blocks_allocated(request, Blocks(), promised)
    step = side.build(SchedulerOutput.make_empty())
    assert step.refused == ["r"]
    assert side.build(SchedulerOutput.make_empty()).refused == []


def test_a_decode_engine_computes_direct_requests():
    side = SchedulerSide(msgspec.structs.replace(SETTINGS, role=Role.DECODE), GEOMETRY, GROUPS)
    request = vllm_request(range(5 * BLOCK_TOKENS))
    assert side.matched_tokens(request, 0) == (0, False)
    side.blocks_allocated(request, Blocks(), 0)
    assert side.build(SchedulerOutput.make_empty()).refused == []


def _json(value):
    """Return a value encoded for HTTP and decoded again."""
    return msgspec.json.decode(msgspec.json.encode(value))


# ------------------------------------------------------------------ refusals


def engine_config(budgets=None, **cache):
    cache = {
        "prefix_caching_hash_algo": "sha256_cbor",
        "enable_prefix_caching": False,
        "block_size": BLOCK_TOKENS,
    } | cache
    budgets = {
        "max_num_batched_tokens": 2048,
        "max_num_scheduled_tokens": None,
        "long_prefill_token_threshold": 0,
    } | (budgets or {})
    return SimpleNamespace(
        parallel_config=ParallelConfig(),
        model_config=SimpleNamespace(is_diffusion=False, is_encoder_decoder=False),
        compilation_config=SimpleNamespace(static_forward_context={}),
        weight_transfer_config=None,
        num_prefill_lookahead_tokens=0,
        lora_config=None,
        kv_transfer_config=KVTransferConfig(kv_connector_extra_config=EXTRA),
        cache_config=SimpleNamespace(**cache),
        scheduler_config=SimpleNamespace(
            scheduler_cls=QuotaScheduler, async_scheduling=False, **budgets
        ),
    )


EXTRA = {
    "role": "prefill", "engine_id": "pe-0", "router": "tcp://h:1", "api_url": "http://h:2",
    "storage": "s",
}  # fmt: skip
ONE_GROUP = cache_of(["layers.0.attn"], full_attention(BLOCK_TOKENS))


def test_an_engine_with_other_keys_is_refused(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    check_engine_config(engine_config(), SETTINGS, ONE_GROUP)
    with pytest.raises(ConfigError, match=r"sha256_cbor.*needs: --enable-scale-out --prefix"):
        check_engine_config(engine_config(prefix_caching_hash_algo="xxhash"), SETTINGS, ONE_GROUP)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    with pytest.raises(ConfigError, match=r"PYTHONHASHSEED is 7.*unset it"):
        check_engine_config(engine_config(), SETTINGS, ONE_GROUP)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # What the engine of a dense model's second rank sees: vLLM has reset the size.
        ({"data_parallel_index": 1}, "rank 1 of independent replicas of a dense model"),
        ({"enable_elastic_ep": True}, "variable size; leave --enable-elastic-ep out"),
        ({"decode_context_parallel_size": 2}, r"context parallel sizes are \(1, 2\)"),
        ({"prefill_context_parallel_size": 2}, r"context parallel sizes are \(2, 1\)"),
        ({"pipeline_parallel_size": 2}, "pipeline parallel size is 2: layers would be spread"),
    ],
)
def test_unsupported_parallel_settings_are_refused(change, message):
    config = engine_config()
    for name, value in change.items():
        setattr(config.parallel_config, name, value)
    with pytest.raises(ConfigError, match=message):
        check_engine_config(config, SETTINGS, ONE_GROUP)


def test_ranks_have_different_engine_ids():
    """Also if all ranks have the same settings."""
    names = set()
    for rank, size in ((0, 2), (1, 2)):
        config = engine_config()
        config.parallel_config.data_parallel_size = size
        config.parallel_config.data_parallel_index = rank
        check_engine_config(config, SETTINGS, ONE_GROUP)
        names.add((rank, settings_of(config).engine_id))
    assert names == {(0, "pe-0-dp0"), (1, "pe-0-dp1")}
    assert settings_of(engine_config()).engine_id == "pe-0"


@pytest.mark.parametrize(
    ("part", "field", "message"),
    [
        ("model_config", "is_diffusion", "depends on later tokens"),
        ("model_config", "is_encoder_decoder", "encoder's input"),
        (None, "weight_transfer_config", "weights would change while KV"),
    ],
)
def test_kv_that_depends_on_more_than_earlier_tokens_is_refused(part, field, message):
    config = engine_config()
    setattr(getattr(config, part) if part else config, field, True)
    with pytest.raises(ConfigError, match=message):
        check_engine_config(config, SETTINGS, ONE_GROUP)


def test_vllm_must_fail_requests_that_a_prefill_engine_refuses():
    config = engine_config()
    config.kv_transfer_config.kv_load_failure_policy = "recompute"
    with pytest.raises(ConfigError, match="kv_load_failure_policy is 'recompute'"):
        check_engine_config(config, SETTINGS, ONE_GROUP)
    assert KVTransferConfig().kv_load_failure_policy == "fail"


@pytest.mark.parametrize(
    "name", ["max_num_batched_tokens", "max_num_scheduled_tokens", "long_prefill_token_threshold"]
)
def test_a_token_budget_below_one_block_is_refused_at_a_prefill_engine(name):
    """Chunks end at block boundaries: its scheduler would wait for ever for a whole block."""
    check_engine_config(engine_config({name: BLOCK_TOKENS}), SETTINGS, ONE_GROUP)
    few = engine_config({name: BLOCK_TOKENS - 1})
    flag = name.replace("_", "-")
    with pytest.raises(ConfigError, match=rf"{flag} is 15, .* set --{flag} to at least 16"):
        check_engine_config(few, SETTINGS, ONE_GROUP)
    check_engine_config(few, msgspec.structs.replace(SETTINGS, role=Role.DECODE), ONE_GROUP)
