"""An adapter's digest covers everything that changes what the adapter computes."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from tests.unit.test_engine_arguments import EXTRA, typed
from vllm.config.lora import LoRAConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.models.protocol import LoRAModulePath

from dualpath.core.errors import ConfigError
from dualpath.engine.settings import parse_settings
from dualpath.vllm import engine_arguments
from dualpath.vllm.model_identity import ADAPTER_FIELDS, adapter_problems, adapters_of
from dualpath_lab.models.random_models import make_tiny_adapter, make_tiny_model

#: Fields of ``LoRAConfig`` that are limits, memory or kernels; the last one is refused.
NEUTRAL = {
    "fully_sharded_loras", "max_cpu_loras", "max_lora_cls_labels", "max_lora_rank", "max_loras",
    "specialize_active_lora", "default_mm_loras",
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALPATH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    model = make_tiny_model("qwen2", tmp_path / "model", layers=1)
    return make_tiny_adapter(model, 1, tmp_path / "adapter")


def engine(lora: LoRAConfig | None = None) -> Any:
    return SimpleNamespace(lora_config=lora or LoRAConfig(max_cpu_loras=4))


def settings(**modules: Path | str) -> Any:
    required = {"engine_id": "pe-0", "api_url": "http://127.0.0.1:1"}
    parsed = parse_settings(EXTRA | required)
    paths = {name: str(path) for name, path in modules.items()}
    return msgspec.structs.replace(parsed, lora_modules=paths)


def digest(adapter: Path, lora: LoRAConfig | None = None) -> str:
    (found,) = adapters_of(engine(lora), settings(sql=adapter))
    assert (found.name, found.path) == ("sql", str(adapter))
    return found.digest


def test_every_field_of_vllms_lora_configuration_is_classified() -> None:
    fields = {field.name for field in dataclasses.fields(LoRAConfig)}
    assert fields == NEUTRAL | set(ADAPTER_FIELDS)


@pytest.mark.parametrize("field", ADAPTER_FIELDS)
def test_a_setting_that_changes_an_adapters_weights_changes_its_digest(
    field: str, adapter: Path
) -> None:
    changed = LoRAConfig(max_cpu_loras=4)
    setattr(changed, field, "another")
    assert digest(adapter, changed) != digest(adapter)


def test_the_digest_depends_on_every_byte_of_an_adapter_but_not_on_its_path(
    adapter: Path, tmp_path: Path
) -> None:
    before = digest(adapter)
    moved = adapter.rename(tmp_path / "moved")
    assert digest(moved) == before
    weights = moved / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert digest(moved) != before
    (moved / "adapter_config.json").write_text("{}")
    assert len({before, digest(moved)}) == 2


def test_a_missing_adapter_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'sql' at .*missing"):
        digest(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no adapter_config\.json and no weights"):
        digest(tmp_path / "empty")


def test_adapters_that_could_change_while_their_kv_is_stored_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two = settings(sql="/sql", chat="/chat")
    assert adapter_problems(engine(), two) == []
    assert adapter_problems(SimpleNamespace(lora_config=None), settings()) == []
    (missing,) = adapter_problems(SimpleNamespace(lora_config=None), two)
    assert "without --enable-lora" in missing
    (evicted,) = adapter_problems(engine(LoRAConfig(max_cpu_loras=1)), two)
    assert "--max-cpu-loras 2" in evicted
    (unnamed,) = adapter_problems(
        engine(LoRAConfig(max_cpu_loras=4, default_mm_loras={"image": "/x"})), two
    )
    assert "--lora-modules" in unnamed
    (nameless,) = adapter_problems(engine(), settings(**{"a\nb": "/sql"}))
    assert "is not a valid name" in nameless
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    (updated,) = adapter_problems(engine(), two)
    assert "unset it" in updated


def test_the_engine_reads_its_adapters_from_vllms_command_line() -> None:
    modules = [LoRAModulePath("sql", "/sql"), LoRAModulePath("chat", "/chat")]
    args = typed(lora_modules=modules, max_loras=1, max_cpu_loras=None)
    assert "--max-cpu-loras 2" in engine_arguments.complete(args)
    assert args.max_cpu_loras == 2
    extra = args.kv_transfer_config.kv_connector_extra_config
    assert extra["lora_modules"] == {"sql": "/sql", "chat": "/chat"}
    assert parse_settings(extra).lora_modules == {"sql": "/sql", "chat": "/chat"}

    completed = typed(lora_modules=modules, max_loras=3, max_cpu_loras=5)
    engine_arguments.complete(completed)
    assert completed.max_cpu_loras == 5

    stacked = [LoRAModulePath("sql", "/sql", is_3d_lora_weight=True)]
    with pytest.raises(ConfigError, match="is_3d_lora_weight"):
        engine_arguments.complete(typed(lora_modules=stacked, max_loras=1, max_cpu_loras=None))


def test_our_arguments_are_vllms() -> None:
    parser = AsyncEngineArgs.add_cli_args(engine_parser())
    arguments = engine_arguments.lora_arguments({"sql": "/sql"})
    known = parser.parse_args(arguments[: arguments.index("--lora-modules")])
    assert known.enable_lora is True
    assert known.max_cpu_loras == 1
    assert engine_arguments.lora_arguments({}) == []


def engine_parser() -> Any:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return FlexibleArgumentParser()
