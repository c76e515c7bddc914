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


def model_fingerprint(model: "ModelConfig") -> str:
    """Name a model by its content, wherever it lies.

    A local folder is named by its base name and a digest of the configuration, the weight files'
    names and sizes and the first and last 64 KiB of each; a hub model by name and revision.
    """
    folder = Path(model.model)
    if not folder.is_dir():
        return f"{model.model}@{model.revision or 'main'}"
    digest = hashlib.sha256(
        json.dumps(model.hf_config.to_dict(), sort_keys=True, default=str).encode()
    )
    for file in sorted(folder.iterdir()):
        if file.suffix in _WEIGHT_SUFFIXES:
            size = file.stat().st_size
            digest.update(f"{file.name}:{size}".encode())
            with file.open("rb") as stream:
                digest.update(stream.read(_SAMPLE_BYTES))
                stream.seek(max(size - _SAMPLE_BYTES, 0))
                digest.update(stream.read(_SAMPLE_BYTES))
    return f"{folder.name}-{digest.hexdigest()[:12]}"


def kv_layout(config: "VllmConfig", backend: str) -> str:
    """Name how bytes lie within a Layer Block.

    The CPU backend packs KV for the instruction set it finds, so that set is part of the layout.
    """
    device = current_platform.device_type
    packing = torch.backends.cpu.get_cpu_capability() if device == "cpu" else "native"
    layout = config.cache_config.cache_dtype
    return f"{device}-{packing}-{backend}-{layout}"
