"""What makes the KV of two engines interchangeable: the identity of a model and of its layout."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
_SAMPLE_BYTES = 1 << 16
#: What transformers adds to a configuration: where it was read, and by which version.
_NOT_OF_THE_MODEL = frozenset({"_name_or_path", "transformers_version"})


def model_fingerprint(model: "ModelConfig") -> str:
    """Name a model by what makes its KV, wherever it lies: weights and effective configuration.

    The configuration is what is left of the model's own after ``--hf-overrides`` (RoPE scaling,
    say), with the quantization that is applied while loading.  Weights are those of a hub model's
    name and revision; of a local folder, the weight files' names and sizes and the first and last
    64 KiB of each.
    """
    digest = hashlib.sha256(_effective_config(model))
    folder = Path(model.model)
    if folder.is_dir():
        name = folder.name
        _add_weights(digest, folder)
    else:
        name = f"{model.model}@{model.revision or 'main'}"
    return f"{name}-{digest.hexdigest()[:12]}"


def _effective_config(model: "ModelConfig") -> bytes:
    config = {
        key: value
        for key, value in model.hf_config.to_dict().items()
        if key not in _NOT_OF_THE_MODEL
    }
    content = {"config": config, "quantization": model.quantization}
    return json.dumps(content, sort_keys=True, default=str).encode()


def _add_weights(digest: "hashlib._Hash", folder: Path) -> None:
    for file in sorted(folder.iterdir()):
        if file.suffix in _WEIGHT_SUFFIXES:
            size = file.stat().st_size
            digest.update(f"{file.name}:{size}".encode())
            with file.open("rb") as stream:
                digest.update(stream.read(_SAMPLE_BYTES))
                stream.seek(max(size - _SAMPLE_BYTES, 0))
                digest.update(stream.read(_SAMPLE_BYTES))


def kv_layout(config: "VllmConfig", backend: str) -> str:
    """Name how bytes lie within a Layer Block.

    The CPU backend packs KV for the instruction set it finds, so that set is part of the layout.
    """
    device = current_platform.device_type
    packing = torch.backends.cpu.get_cpu_capability() if device == "cpu" else "native"
    layout = config.cache_config.cache_dtype
    return f"{device}-{packing}-{backend}-{layout}"
