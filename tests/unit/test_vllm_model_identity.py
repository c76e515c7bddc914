"""Which engines may load each other's KV: those whose model has one fingerprint."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from dualpath.vllm.model_identity import model_fingerprint

CONFIG: dict[str, Any] = {
    "num_hidden_layers": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_window": None,
}


def model(name: str = "org/model", revision: str | None = None, **fields: Any) -> Any:
    """A model configuration with what the fingerprint looks at."""
    config = {**CONFIG, **fields.pop("config", {})}
    quantization = fields.pop("quantization", None)
    return SimpleNamespace(
        model=name,
        revision=revision,
        quantization=quantization,
        hf_config=SimpleNamespace(to_dict=lambda: config),
    )


@pytest.mark.parametrize(
    "other",
    [
        model("org/another"),
        model(revision="v2"),
        model(quantization="fp8"),
        model(config={"num_hidden_layers": 5}),
        model(config={"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}),
        model(config={"sliding_window": 4096}),
        model(config={"a_field_of_tomorrow": True}),
    ],
)
def test_whatever_changes_kv_gives_a_hub_model_another_fingerprint(other: Any) -> None:
    assert model_fingerprint(other) != model_fingerprint(model())


def test_where_and_by_whom_a_configuration_was_read_changes_nothing() -> None:
    read = {"_name_or_path": "elsewhere", "transformers_version": "99"}
    assert model_fingerprint(model(config=read)) == model_fingerprint(model())


def test_a_local_model_is_its_weights_and_configuration_wherever_it_lies(tmp_path: Path) -> None:
    folders = [tmp_path / place / "model" for place in ("here", "there", "changed")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"weights")
    (folders[2] / "model.safetensors").write_bytes(b"Weights")
    here, there, changed = (model_fingerprint(model(str(folder))) for folder in folders)
    overridden = model_fingerprint(model(str(folders[0]), config={"sliding_window": 4096}))
    assert here == there
    assert len({here, changed, overridden}) == 3
