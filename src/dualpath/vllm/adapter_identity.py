"""Identity of an engine's LoRA adapters: a digest over everything that changes their requests' KV.

The digest covers an adapter's files and the few settings with which vLLM derives different weights
from them.  The base model's identity (``model_identity``) does not depend on adapters: requests
without an adapter share their KV with engines that have no adapters.
"""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from vllm import envs
from vllm.lora.utils import get_adapter_absolute_path

from dualpath.core.adapters import Adapter
from dualpath.core.errors import ConfigError
from dualpath.core.names import name_problem
from dualpath.engine.settings import EngineSettings
from dualpath.vllm.weight_digest import files_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Fields of vLLM's ``LoRAConfig`` that change what an adapter computes.  The other fields set
#: limits and memory or choose kernels; ``default_mm_loras`` is refused.
ADAPTER_FIELDS = (
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
    "enable_tower_connector_lora",
    "lora_dtype",
    "target_modules",
)
#: Suffixes of the files that vLLM reads in an adapter's folder.
_SUFFIXES = frozenset({".json", ".safetensors", ".bin", ".pt", ".tensors"})


def adapters_of(config: "VllmConfig", settings: EngineSettings) -> tuple[Adapter, ...]:
    """Return this engine's adapters; reads their files, once per machine.

    Raises ``ConfigError`` for an adapter with missing or unreadable files.
    """
    return tuple(
        Adapter(name, path, _adapter_digest(config, name, path))
        for name, path in settings.lora_modules.items()
    )


def adapter_problems(config: "VllmConfig", settings: EngineSettings) -> list[str]:
    """Describe the settings under which the KV of two adapters could be confused."""
    lora = config.lora_config
    if lora is None:
        modules = " ".join(f"{name}={path}" for name, path in settings.lora_modules.items())
        return [f"--lora-modules {modules} without --enable-lora; add it"] if modules else []
    problems = [
        f"adapter {name!r} at {path!r}: {wrong}"
        for name, path in settings.lora_modules.items()
        if (wrong := name_problem(name) or name_problem(path)) is not None
    ]
    if (lora.max_cpu_loras or 0) < (count := len(settings.lora_modules)):
        problems.append(
            f"max_cpu_loras is {lora.max_cpu_loras} for {count} adapters: vLLM could evict an "
            f"adapter and reload it from changed files; give --max-cpu-loras {count}"
        )
    if envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
        problems.append(
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING is set: adapters could change while KV computed "
            "with their former weights is stored; unset it"
        )
    if lora.default_mm_loras:
        problems.append(
            "default_mm_loras is set: it applies adapters that requests do not name; give the "
            "adapters with --lora-modules"
        )
    return problems


def _adapter_digest(config: "VllmConfig", name: str, path: str) -> str:
    try:
        folder = Path(get_adapter_absolute_path(path))
        files = [file for file in folder.iterdir() if file.suffix in _SUFFIXES]
        content = files_digest(files)
    except OSError as error:
        raise ConfigError(
            f"adapter {name!r} at {path!r}: {error}; its files must be readable, since their "
            "digest is part of the keys of stored KV"
        ) from error
    if not files:
        raise ConfigError(
            f"adapter {name!r} at {path!r} has no adapter_config.json and no weights; give its "
            "folder in --lora-modules"
        )
    settings = {field: getattr(config.lora_config, field) for field in ADAPTER_FIELDS}
    text = json.dumps({"files": content, "settings": settings}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
