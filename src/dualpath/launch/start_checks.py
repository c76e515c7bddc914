"""Checks before a cluster's start that would otherwise fail after a minute; also in a dry run."""

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

from dualpath.core.errors import ConfigError
from dualpath.launch.settings import LocalClusterSettings
from dualpath.storage.factory import directory_of

#: vLLM's attention kernels need a block size that is a multiple of this; some need more.
_KERNEL_TOKENS = 16
_TENSOR_PARALLEL = ("--tensor-parallel-size", "-tp")


def check_settings(settings: LocalClusterSettings) -> None:
    """Raise ``ConfigError`` for a model, block size or division that no engine can start with."""
    if settings.block_tokens % _KERNEL_TOKENS:
        raise ConfigError(
            f"{{block_tokens}} is {settings.block_tokens}; attention kernels need a multiple of "
            f"{_KERNEL_TOKENS} tokens, such as 64"
        )
    config = _model_config(settings.model)
    heads = config.get("num_attention_heads")
    if isinstance(heads, int):
        for flag, devices in _divisions(settings).items():
            if devices < 1 or heads % devices:
                raise ConfigError(
                    f"{flag} is {devices}, and model {settings.model!r} has {heads} attention "
                    "heads, which must divide evenly over devices; give a divisor"
                )


def check_storage(storage: str) -> None:
    """Create the storage's directory; raise ``ConfigError`` if it cannot be written."""
    path = directory_of(storage)
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return
    except OSError as error:
        raise ConfigError(
            f"storage {str(path)!r} cannot be written ({error.strerror}); give a writable "
            "directory with --storage"
        ) from error


def _model_config(model: str) -> dict[str, Any]:
    """Return the ``config.json`` of a model folder's text model; empty for a hub name."""
    path = Path(model).expanduser()
    looks_local = model.startswith(("/", ".", "~")) or model.count("/") > 1 or path.exists()
    if not looks_local:
        return {}
    try:
        found: dict[str, Any] = json.loads((path / "config.json").read_bytes())
        text = found.get("text_config")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"model {model!r} is not a folder with a config.json ({error}); give a model folder or "
            "a hub name, or create one with `dualpath model smollm2`"
        ) from error
    return text if isinstance(text, dict) else found


def _divisions(settings: LocalClusterSettings) -> dict[str, int]:
    """Return the tensor parallel sizes of engines, by the flag that sets each."""
    found = {"{prefill_tp}": settings.prefill_tp, "{decode_tp}": settings.decode_tp}
    words = [part for word in settings.vllm_args for part in word.split("=", 1)]
    for flag, value in itertools.pairwise(words):
        if flag in _TENSOR_PARALLEL and value.isdecimal():
            found[f"{flag} among {{vllm_args}}"] = int(value)
    return found
