"""Which engines may load each other's KV: those with the same model and layout identity.

Every field of vLLM's configuration is either in the identity or in ``tests/vllm_fields.py`` as
one that changes KV by rounding at most, so that a field of another version of vLLM is a decision
and no accident.
"""

import copy
import dataclasses
import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm
from tests.vllm_fields import LOOKED_AT, NEUTRAL, NEUTRAL_LATER, REFUSED
from vllm import envs
from vllm.config import VllmConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from dualpath.core.errors import ConfigError
from dualpath.vllm import model_identity
from dualpath.vllm.model_identity import (
    IMAGE_FIELDS,
    KV_FIELDS,
    KV_VARIABLES,
    kv_layout,
    model_fingerprint,
)
from dualpath_lab.models.random_models import make_tiny_model


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALPATH_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def made() -> VllmConfig:
    """vLLM's configuration of a small model, as an engine has it."""
    folder = make_tiny_model("qwen2")
    arguments = AsyncEngineArgs(model=str(folder), dtype="float32", max_model_len=512)
    return arguments.create_engine_config()


@pytest.fixture
def config(made: VllmConfig) -> VllmConfig:
    return changed(made)


def changed(config: VllmConfig, part: str = "", **fields: Any) -> VllmConfig:
    """The configuration with other values in one of its parts."""
    other = copy.copy(config)
    for name in ("model_config", "cache_config", "attention_config", "load_config"):
        setattr(other, name, copy.copy(getattr(config, name)))
    other.model_config.hf_config = copy.deepcopy(config.model_config.hf_config)
    other.model_config.hf_text_config = other.model_config.hf_config
    for name, value in fields.items():
        setattr(getattr(other, part) if part else other, name, value)
    return other


def configured(config: VllmConfig, **fields: Any) -> VllmConfig:
    """The configuration with other model values, as after ``--hf-overrides``."""
    other = changed(config)
    for name, value in fields.items():
        setattr(other.model_config.hf_config, name, value)
    return other


def fields_of(part: str, config: VllmConfig) -> set[str]:
    kind = type(getattr(config, part)) if part else VllmConfig
    return {field.name for field in dataclasses.fields(kind)}


# ------------------------------------------------------------------ every field is decided about


@pytest.mark.parametrize("part", sorted(LOOKED_AT))
def test_every_field_of_vllms_configuration_is_classified(part: str, made: VllmConfig) -> None:
    decided = [
        set(KV_FIELDS.get(part, ())), LOOKED_AT[part], NEUTRAL[part], REFUSED.get(part, set()),
    ]  # fmt: skip
    fields = fields_of(part, made) - NEUTRAL_LATER.get(part, set())
    assert set().union(*decided) == fields
    assert sum(map(len, decided)) == len(fields)


@pytest.mark.parametrize(
    ("part", "field"), [(part, field) for part, fields in KV_FIELDS.items() for field in fields]
)
def test_each_field_that_changes_kv_changes_the_name(
    part: str, field: str, config: VllmConfig
) -> None:
    other = changed(config, part, **{field: "another"})
    assert model_fingerprint(other) != model_fingerprint(config)


@pytest.mark.parametrize("part", sorted(NEUTRAL))
def test_no_other_field_changes_the_name(part: str, config: VllmConfig) -> None:
    before = model_fingerprint(config)
    for field in sorted(NEUTRAL[part] | NEUTRAL_LATER.get(part, set())):
        assert model_fingerprint(changed(config, part, **{field: "another"})) == before, field


@pytest.mark.parametrize("name", KV_VARIABLES)
def test_each_variable_that_changes_kv_changes_the_name(
    name: str, config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = model_fingerprint(config)
    assert name in envs.environment_variables
    monkeypatch.setattr(envs, name, "another", raising=False)
    assert model_fingerprint(config) != before


@pytest.mark.parametrize("name", ["additional_config", "engram_config"])
def test_unknown_parts_are_in_the_name(name: str, config: VllmConfig) -> None:
    other = changed(config)
    setattr(other, name, {"another": 1})
    assert model_fingerprint(other) != model_fingerprint(config)


# ------------------------------------------------------------------ the model's configuration


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": 5},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}},
        {"sliding_window": 4096},
        {"quantization_config": {"quant_method": "fp8"}},
        {"a_field_of_tomorrow": True},
    ],
)
def test_all_of_the_effective_configuration_is_in_the_name(
    fields: dict[str, Any], config: VllmConfig
) -> None:
    assert model_fingerprint(configured(config, **fields)) != model_fingerprint(config)


def test_the_path_and_version_of_a_configuration_are_not_in_the_name(config: VllmConfig) -> None:
    read = configured(config, transformers_version="99", _commit_hash="0" * 40)
    read.model_config.hf_config._name_or_path = "elsewhere"
    assert model_fingerprint(read) == model_fingerprint(config)


def test_another_implementation_of_the_model_is_another_architecture(config: VllmConfig) -> None:
    other = changed(config, "model_config", _architecture="TransformersForCausalLM")
    assert model_fingerprint(other) != model_fingerprint(config)


def test_the_longest_context_counts_where_rope_depends_on_it(config: VllmConfig) -> None:
    """vLLM's longrope uses its long factors if contexts may be longer than the original limit."""
    names: dict[tuple[str, int], list[str]] = {}
    for kind in ("yarn", "longrope", "dynamic"):
        rope = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 1000}
        for scale in (
            rope,
            {"full_attention": rope, "sliding_attention": {"rope_type": "default"}},
        ):
            for longest in (500, 1000, 1001, 4000):
                other = configured(config, rope_parameters=scale)
                other.model_config.max_model_len = longest
                names.setdefault((kind, len(scale)), []).append(model_fingerprint(other))
    for (kind, _), (short, edge, beyond, far) in names.items():
        assert (short, beyond) == (edge, far)
        assert (short != beyond) is (kind == "longrope")


def test_a_draft_model_is_in_the_name_if_its_kv_is_stored_with_the_targets(
    config: VllmConfig,
) -> None:
    def speculating(kv: bool, **fields: Any) -> VllmConfig:
        draft = configured(config, **fields).model_config
        return changed(
            config,
            speculative_config=SimpleNamespace(
                uses_draft_kv_cache=lambda: kv, draft_model_config=draft
            ),
        )

    ngram, mtp, other = speculating(False), speculating(True), speculating(True, layers=2)
    assert model_fingerprint(ngram) == model_fingerprint(config)
    assert len({model_fingerprint(each) for each in (config, mtp, other)}) == 3


# ------------------------------------------------------------------ images

#: Fields of ``MultiModalConfig`` that concern the front end, memory, or rounding.
NEUTRAL_FOR_IMAGES = {
    "allow_missing_mm_embeddings", "enable_mm_embeds", "interleave_mm_strings", "limit_per_prompt",
    "media_io_kwargs", "mm_encoder_attn_backend", "mm_encoder_tp_mode", "mm_hasher_algorithm",
    "mm_ipc_gpu_memory_gb", "mm_processor_cache_gb", "mm_processor_cache_type",
    "mm_encoder_fp8_scale_path",  # its file is part of the identity
    "mm_processor_kwargs", "mm_shm_cache_max_object_size_mb", "mm_tensor_ipc",
    "skip_mm_profiling",
}  # fmt: skip


def seeing(config: VllmConfig, **fields: Any) -> VllmConfig:
    images = MultiModalConfig()
    for name, value in fields.items():
        setattr(images, name, value)
    return changed(config, "model_config", multimodal_config=images)


def test_every_field_of_the_multimodal_configuration_is_classified() -> None:
    fields = {field.name for field in dataclasses.fields(MultiModalConfig)}
    assert fields - NEUTRAL_FOR_IMAGES - set(IMAGE_FIELDS) == set()


@pytest.mark.parametrize("field", IMAGE_FIELDS)
def test_how_images_are_encoded_is_in_the_name(field: str, config: VllmConfig) -> None:
    other = seeing(config, **{field: "another"})
    assert model_fingerprint(other) != model_fingerprint(seeing(config))


def test_a_processors_files_are_in_the_name_of_a_multimodal_model(
    config: VllmConfig, tmp_path: Path
) -> None:
    place = folder(tmp_path, model__safetensors=b"w")
    names = []
    for content in ("{}", '{"image_mean": [0]}'):
        (place / "preprocessor_config.json").write_text(content)
        names.append(model_fingerprint(at(seeing(config), place)))
        names.append(model_fingerprint(at(config, place)))
    assert names[0] != names[2]
    assert names[1] == names[3]
    scales = tmp_path / "scales.json"
    for content in ("{}", '{"layer": 1}'):
        scales.write_text(content)
        names.append(
            model_fingerprint(at(seeing(config, mm_encoder_fp8_scale_path=str(scales)), place))
        )
    assert len({names[2], *names[4:]}) == 3


# ------------------------------------------------------------------ weights


def at(config: VllmConfig, model: Path | str, **fields: Any) -> VllmConfig:
    return changed(config, "model_config", model=str(model), **fields)


def folder(root: Path, **files: bytes) -> Path:
    """A model folder with a fixed name, in any parent folder."""
    place = root / "model"
    place.mkdir(parents=True)
    for name, content in files.items():
        (place / name.replace("__", ".")).write_bytes(content)
    return place


MEGABYTE = bytes(1 << 20)


def test_a_local_model_is_identified_by_its_weights_not_its_path(
    config: VllmConfig, tmp_path: Path
) -> None:
    here = folder(tmp_path / "here", a__safetensors=MEGABYTE)
    there = folder(tmp_path / "there", a__safetensors=MEGABYTE, README__md=b"new")
    assert model_fingerprint(at(config, here)) == model_fingerprint(at(config, there))


def test_one_byte_in_the_middle_makes_another_model(config: VllmConfig, tmp_path: Path) -> None:
    """As after merging an adapter or retraining a token; samples of head and tail are equal."""
    model = folder(tmp_path, a__safetensors=MEGABYTE, b__safetensors=MEGABYTE)
    before = model_fingerprint(at(config, model))
    weights = bytearray(MEGABYTE)
    weights[len(weights) // 2] ^= 1
    (model / "b.safetensors").write_bytes(weights)
    assert model_fingerprint(at(config, model)) != before
    (model / "b.safetensors").rename(model / "c.safetensors")
    assert model_fingerprint(at(config, model)) != before


def test_only_files_that_are_loaded_count(config: VllmConfig, tmp_path: Path) -> None:
    plain = folder(tmp_path / "plain", a__safetensors=b"weights")
    both = folder(tmp_path / "both", a__safetensors=b"weights", a__bin=b"the same, in pickles")
    assert model_fingerprint(at(config, plain)) == model_fingerprint(at(config, both))
    pickled = [changed(at(config, each), "load_config", load_format="pt") for each in (plain, both)]
    assert len({model_fingerprint(each) for each in pickled}) == 2


def test_a_hub_model_is_identified_by_the_sha256_names_of_its_cache(
    config: VllmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same as for a local copy, which is read; another commit of ``main`` is another model."""

    def cached(commit: str, content: bytes) -> None:
        repository = tmp_path / "hub" / "models--org--model"
        blob = repository / "blobs" / hashlib.sha256(content).hexdigest()
        snapshot = repository / "snapshots" / commit
        for place in (blob.parent, snapshot, repository / "refs"):
            place.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(b"is not read")
        (snapshot / "a.safetensors").symlink_to(blob)
        (repository / "refs" / "main").write_text(commit)

    hub = changed(at(config, "org/model"), "load_config", download_dir=str(tmp_path / "hub"))
    cached("1" * 40, b"weights")
    first = model_fingerprint(hub)
    assert first == model_fingerprint(at(config, folder(tmp_path, a__safetensors=b"weights")))
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / ("1" * 40)
    assert model_fingerprint(at(config, snapshot)) == first
    cached("2" * 40, b"other weights")
    assert model_fingerprint(hub) != first
    hub.model_config.revision = "1" * 40
    assert model_fingerprint(hub) == first


def test_weights_that_cannot_be_identified_are_refused(config: VllmConfig, tmp_path: Path) -> None:
    for unknown in (at(config, "org/absent"), at(config, "org/absent", revision="main")):
        with pytest.raises(ConfigError, match="could be confused with that of other weights"):
            model_fingerprint(unknown)
    with pytest.raises(ConfigError, match="neither files of a folder"):
        model_fingerprint(at(config, folder(tmp_path, config__json=b"{}")))
    for load_format in ("tensorizer", "a_loader_of_tomorrow"):
        with pytest.raises(ConfigError, match=f"loaded as {load_format}"):
            model_fingerprint(changed(config, "load_config", load_format=load_format))
    whole = [model_fingerprint(at(config, "org/absent", revision=digit * 40)) for digit in "ab"]
    assert len({*whole}) == 2


def test_random_weights_and_those_of_object_stores_are_known_by_name(
    config: VllmConfig, tmp_path: Path
) -> None:
    empty = at(config, folder(tmp_path))
    dummy = changed(empty, "load_config", load_format="dummy")
    stores = [
        changed(empty, "model_config", model_weights=uri)
        for uri in ("s3://bucket/one", "s3://bucket/two")
    ]
    assert len({model_fingerprint(each) for each in (dummy, *stores)}) == 3


def test_code_that_comes_with_the_weights_counts_if_it_is_trusted(
    config: VllmConfig, tmp_path: Path
) -> None:
    one = folder(tmp_path / "one", a__safetensors=b"weights", modeling__py=b"x = 1")
    two = folder(tmp_path / "two", a__safetensors=b"weights", modeling__py=b"x = 2")
    assert model_fingerprint(at(config, one)) == model_fingerprint(at(config, two))
    trusted = [at(config, each, trust_remote_code=True) for each in (one, two)]
    trusted.append(at(config, one, trust_remote_code=True, code_revision="v2"))
    assert len({model_fingerprint(each) for each in trusted}) == 3


def test_weights_are_read_once(
    config: VllmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = folder(tmp_path, a__safetensors=MEGABYTE)
    before = model_fingerprint(at(config, model))
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", None)
        assert model_fingerprint(at(config, model)) == before
    (model / "a.safetensors").write_bytes(b"\1" + MEGABYTE[1:])
    assert model_fingerprint(at(config, model)) != before


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"path": 7}', b"\xff"])
def test_an_unreadable_cached_digest_is_computed_again(
    content: bytes, config: VllmConfig, tmp_path: Path
) -> None:
    model = at(config, folder(tmp_path, a__safetensors=MEGABYTE))
    before = model_fingerprint(model)
    (file,) = (tmp_path / "cache" / "weights").iterdir()
    assert json.loads(file.read_bytes())["size_bytes"] == len(MEGABYTE)
    file.write_bytes(content)
    assert model_fingerprint(model) == before


def test_without_a_writable_cache_weights_are_read_again(
    config: VllmConfig, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_bytes(b"a file in its place")
    model = at(config, folder(tmp_path, a__safetensors=MEGABYTE))
    assert model_fingerprint(model) == model_fingerprint(model)


# ------------------------------------------------------------------ layout


def laid_out(config: VllmConfig, backend: str = "CPU_ATTN", dtype: str = "auto") -> VllmConfig:
    """The configuration of an engine with these resolved layers."""
    layer = SimpleNamespace(
        get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend), kv_cache_dtype=dtype
    )
    compiled = SimpleNamespace(static_forward_context={"layer": layer})
    order = changed(config, "cache_config", kv_cache_layout="LBHNC")
    return changed(order, compilation_config=compiled)


def test_the_layout_is_that_of_the_attention_that_was_chosen(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts = [kv_layout(laid_out(config), ["layer"])]
    assert layouts[0].endswith("CPU_ATTN.auto-LBHNC-vllm0.32.0")
    layouts.append(kv_layout(laid_out(config, backend="FLASHINFER"), ["layer"]))
    layouts.append(kv_layout(laid_out(config, dtype="fp8"), ["layer"]))
    other_order = changed(laid_out(config), "cache_config", kv_cache_layout="LBNHC")
    layouts.append(kv_layout(other_order, ["layer"]))
    with monkeypatch.context() as patch:
        patch.setattr(vllm, "__version__", "0.33.0+cpu")
        layouts.append(kv_layout(laid_out(config), ["layer"]))
    monkeypatch.setattr(model_identity, "current_platform", SimpleNamespace(device_type="cuda"))
    layouts.append(kv_layout(laid_out(config), ["layer"]))
    assert len({*layouts}) == len(layouts)
