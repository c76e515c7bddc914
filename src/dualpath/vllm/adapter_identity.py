"""Which LoRA adapters an engine has: the digest of all that changes the KV of their requests.

In it are an adapter's files and the few settings by which vLLM makes other weights of them.  The
base model's identity (``model_identity``) does not change with adapters: requests that name none
share their KV with engines that have none.
"""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from vllm import envs
from vllm.lora.utils import get_adapter_absolute_path

from dualpath.core.adapters import Adapter
from dualpath.core.errors import ConfigError
from dualpath.core.names import unfit_name
from dualpath.engine.settings import EngineSettings
from dualpath.vllm.weight_digest import files_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Fields of vLLM's ``LoRAConfig`` that change what an adapter computes; the others are limits,
#: memory, or choose kernels.  ``default_mm_loras`` is refused.
ADAPTER_FIELDS = (
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
    "enable_tower_connector_lora",
    "lora_dtype",
    "target_modules",
)
#: What vLLM reads of an adapter's folder.
_SUFFIXES = frozenset({".json", ".safetensors", ".bin", ".pt", ".tensors"})


def adapters_of(config: "VllmConfig", settings: EngineSettings) -> tuple[Adapter, ...]:
    """Return this engine's adapters; reads their files, once per machine.

    Raises ``ConfigError`` for one whose files are not there or cannot be named.
    """
    return tuple(
        Adapter(name, path, _digest(config, name, path))
        for name, path in settings.lora_modules.items()
    )


def adapter_problems(config: "VllmConfig", settings: EngineSettings) -> list[str]:
    """Name the settings under which an adapter's KV could be taken for that of another."""
    lora = config.lora_config
    if lora is None:
        modules = " ".join(f"{name}={path}" for name, path in settings.lora_modules.items())
        return [f"--lora-modules {modules} without --enable-lora; add it"] if modules else []
    problems = [
        f"adapter {name!r} at {path!r}: {wrong}"
        for name, path in settings.lora_modules.items()
        if (wrong := unfit_name(name) or unfit_name(path)) is not None
    ]
    if (lora.max_cpu_loras or 0) < (count := len(settings.lora_modules)):
        problems.append(
            f"max_cpu_loras {lora.max_cpu_loras} for {count} adapters, so that one that changed "
            f"could be loaded again; give --max-cpu-loras {count}"
        )
    if envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
        problems.append(
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING is set, by which adapters change under stored KV; "
            "unset it"
        )
    if lora.default_mm_loras:
        problems.append(
            "default_mm_loras, adapters that no request names; give them with --lora-modules"
        )
    return problems


def _digest(config: "VllmConfig", name: str, path: str) -> str:
    try:
        folder = Path(get_adapter_absolute_path(path))
        files = [file for file in folder.iterdir() if file.suffix in _SUFFIXES]
        content = files_digest(files)
    except OSError as error:
        raise ConfigError(
            f"adapter {name!r} at {path!r}: {error}; its files must be readable, since stored KV "
            "is known by them"
        ) from error
    if not files:
        raise ConfigError(
            f"adapter {name!r} at {path!r} has no adapter_config.json and no weights; give its "
            "folder in --lora-modules"
        )
    settings = {field: getattr(config.lora_config, field) for field in ADAPTER_FIELDS}
    text = json.dumps({"files": content, "settings": settings}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
