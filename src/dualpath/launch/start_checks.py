"""Checks before a cluster's start that would otherwise fail after a minute; also in a dry run.

They look and change nothing: what does not exist yet is created by the process that needs it.
"""

import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.engine.control.surroundings import storage_keys
from dualpath.engine.settings import PROFILE_AUTO, PROFILE_OFF, EngineSettings
from dualpath.launch.commands import engine_extra_config, engine_id
from dualpath.launch.ports import claim_port
from dualpath.launch.settings import LocalClusterSettings
from dualpath.node.certificates import trusting_only
from dualpath.node.home import with_home
from dualpath.node.output_files import not_creatable, not_writable
from dualpath.storage.factory import check_location, directory_of
from dualpath.transport.nixl import nixl_package
from dualpath.vllm.engine_arguments import engine_settings, tls_arguments
from dualpath.vllm.pass_costs import read_profile

#: vLLM's attention kernels need a block size that is a multiple of this; some need more.
_KERNEL_TOKENS = 16
_TENSOR_PARALLEL = ("--tensor-parallel-size", "-tp")
_ADAPTER_FILE = "adapter_config.json"


def check_start(
    settings: LocalClusterSettings, environment: Mapping[str, str] = os.environ
) -> None:
    """Raise ``ConfigError`` for settings with which a start fails: of router, engines and files.

    Files of engines on other machines (``executor`` ray) are not looked at.
    """
    if settings.block_tokens % _KERNEL_TOKENS:
        raise ConfigError(
            f"{{block_tokens}} is {settings.block_tokens}; attention kernels need a multiple of "
            f"{_KERNEL_TOKENS} tokens, such as 64"
        )
    config = _model_config(settings.model)
    _check_divisions(settings, config)
    for role in (Role.PREFILL, Role.DECODE):
        _check_engine(settings, role, config, environment)
    _check_outputs(settings)
    if settings.executor == "local":
        check_storage(settings.storage)
        _check_adapters(settings.lora_modules)
    _check_address(settings)


def check_storage(storage: str) -> None:
    """Raise ``ConfigError`` if a storage's directory cannot be written or created."""
    check_location(storage)
    path = directory_of(storage)
    if path is None:
        return
    if (reason := not_creatable(path)) is not None:
        raise ConfigError(
            f"storage {str(path)!r} cannot be written ({reason}); give a writable directory with "
            "--storage"
        )


def needed_packages(settings: LocalClusterSettings) -> tuple[str, ...]:
    """Return the optional packages without which a start fails."""
    moves = [nixl_package()] if settings.mode.moves_bytes else []
    return ("vllm", *moves, *(["ray"] if settings.executor == "ray" else []))


def _check_address(settings: LocalClusterSettings) -> None:
    """Refuse a taken port, and a certificate or key that cannot be used."""
    claim_port(settings.host, settings.port)
    tls = tls_arguments(settings.vllm_args)
    if tls.certificate_file:
        trusting_only(tls.certificate_file, tls.key_file)


def _check_engine(
    settings: LocalClusterSettings,
    role: Role,
    config: Mapping[str, Any],
    environment: Mapping[str, str],
) -> None:
    """Build the settings of an engine as the engine will, and read the files that they name."""
    name = engine_id(role, 0)
    extra = engine_extra_config(
        settings, role, name, name, "http://127.0.0.1:1", "tcp://127.0.0.1:1"
    )
    engine = engine_settings(extra, environment)
    if settings.executor == "local":
        storage_keys(engine)
        if role is Role.PREFILL and engine.profile not in (PROFILE_AUTO, PROFILE_OFF):
            read_profile(engine.profile)
    _check_buffer(engine, config, settings.block_tokens)


def _check_buffer(engine: EngineSettings, config: Mapping[str, Any], block_tokens: int) -> None:
    """Refuse a buffer that is too small for one Full Block, however small KV's dtype is."""
    layers = config.get("num_hidden_layers")
    least_bytes = block_tokens * (layers if isinstance(layers, int) and layers > 0 else 1)
    if engine.mode.moves_bytes:
        engine.check_buffer(least_bytes)


def _check_outputs(settings: LocalClusterSettings) -> None:
    for name in ("log_dir", "trace_dir", "dram_dir"):
        folder = getattr(settings, name)
        if folder and (reason := not_creatable(Path(folder))) is not None:
            raise ConfigError(
                f"{{{name}}} {folder!r} cannot be written ({reason}); give a writable directory"
            )
    if settings.event_log and (reason := not_writable(settings.event_log)) is not None:
        raise ConfigError(
            f"{{event_log}} {settings.event_log!r} cannot be written ({reason}); give a file in a "
            "writable folder"
        )


def _check_adapters(modules: Mapping[str, str]) -> None:
    for name, path in modules.items():
        try:
            if _looks_local(path):
                (Path(path).expanduser() / _ADAPTER_FILE).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{{lora_modules}} {name}={path}: {_ADAPTER_FILE} cannot be read "
                f"({error.strerror}); give the adapter's folder"
            ) from error


def _check_divisions(settings: LocalClusterSettings, config: Mapping[str, Any]) -> None:
    heads = config.get("num_attention_heads")
    if isinstance(heads, int):
        for flag, devices in _divisions(settings).items():
            if devices < 1 or heads % devices:
                raise ConfigError(
                    f"{flag} is {devices}, and model {settings.model!r} has {heads} attention "
                    "heads, which must divide evenly over devices; give a divisor"
                )


def _looks_local(model: str) -> bool:
    """Whether a name is a path and not a name at the hub; raises ``OSError``."""
    local = model.startswith(("/", ".", "~")) or model.count("/") > 1
    return local or Path(model).exists()


def _model_config(model: str) -> dict[str, Any]:
    """Return the ``config.json`` of a model folder's text model; empty for a hub name."""
    remedy = "give a model folder or a hub name, or create one with `dualpath model smollm2`"
    file = Path(with_home(model)) / "config.json"
    try:
        if not _looks_local(model):
            return {}
        content = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"model {model!r} is not a folder with a config.json; {remedy}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {model!r}: {file} cannot be read ({error}); {remedy}") from error
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON ({error}); correct it") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is not a JSON object; correct it, or {remedy}")
    text = found.get("text_config")
    return text if isinstance(text, dict) else found


def _divisions(settings: LocalClusterSettings) -> dict[str, int]:
    """Return the tensor parallel sizes of engines, by the flag that sets each."""
    found = {"{prefill_tp}": settings.prefill_tp, "{decode_tp}": settings.decode_tp}
    words = [part for word in settings.vllm_args for part in word.split("=", 1)]
    for flag, value in itertools.pairwise(words):
        if flag in _TENSOR_PARALLEL and value.isdecimal():
            found[f"{flag} among {{vllm_args}}"] = int(value)
    return found
