"""The identity of a model and its KV layout: engines with equal identities can share KV.

A block's key identifies its tokens; this identity identifies the *function* of tokens.  It contains
everything that changes KV by more than rounding: weights, effective configuration, quantization,
and the few settings and variables of vLLM that change the computation.  It does not contain what
changes KV by rounding only, such as kernels, batch sizes, parallelism or the GPU: the KV of one
prompt differs by as much between two runs of one engine.  docs/reference/namespaces.md is the list;
a test compares every field of vLLM's configuration with it.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import vllm
from vllm import envs
from vllm.lora.utils import get_adapter_absolute_path
from vllm.platforms import current_platform

from dualpath.core.errors import ConfigError
from dualpath.core.key_cache import Adapter
from dualpath.core.names import name_problem
from dualpath.engine.settings import EngineSettings
from dualpath.node.cache_directory import private_cache_directory
from dualpath.node.output_files import write_whole

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

# ----------------------------------------------------------------------------------- weight digest
# Identifies the weights in a model folder by the SHA-256 of its files.
#
# All bytes are hashed.  A merged adapter or a retrained token changes some tensors in the middle of
# a file without changing its size, head or tail, so a digest of samples could miss the change.  The
# hub's cache names its files by their SHA-256.  Other files are read once per machine, several in
# parallel, and their digests are cached in the cache directory by path, size, inode and times.

log = logging.getLogger(__name__)

_READERS = 8
_SHA256_HEX = 64


class _FileStamp(msgspec.Struct, frozen=True):
    """Path, size, inode and times of a file when its digest was computed."""

    path: str
    size_bytes: int
    inode: int
    modified_ns: int
    changed_ns: int
    sha256: str = ""


def files_digest(files: Iterable[Path]) -> str:
    """Return the SHA-256 over the files' names and contents, in the order of their names.

    Raises ``OSError`` for a file that cannot be read.
    """
    ordered = sorted(files, key=lambda file: file.name)
    with ThreadPoolExecutor(_READERS) as readers:
        digests = list(readers.map(_file_sha256, ordered))
    whole = hashlib.sha256()
    for file, digest in zip(ordered, digests, strict=True):
        whole.update(f"{file.name}\0{digest}\0".encode())
    return whole.hexdigest()


def _file_sha256(file: Path) -> str:
    real = file.resolve()
    if real.parent.name == "blobs" and _is_sha256(real.name):
        return real.name
    stamp = _stamp(real)
    cached = _cached(real)
    known = None if cached is None else _read(cached)
    if known is not None and msgspec.structs.replace(known, sha256="") == stamp:
        return known.sha256
    log.info("reading %s (%.1f GB) once to identify its weights", real, stamp.size_bytes / 1e9)
    with real.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if _stamp(real) == stamp and cached is not None:
        _write(cached, msgspec.structs.replace(stamp, sha256=digest))
    return digest


def _cached(real: Path) -> Path | None:
    """Return the cache's file for a file of weights, None if the cache cannot be trusted."""
    try:
        folder = private_cache_directory() / "weights"
    except ConfigError as error:
        log.warning("digests of weights are not cached: %s", error)
        return None
    return folder / f"{hashlib.sha256(str(real).encode()).hexdigest()}.json"


def _is_sha256(name: str) -> bool:
    return len(name) == _SHA256_HEX and all(digit in "0123456789abcdef" for digit in name)


def _stamp(file: Path) -> _FileStamp:
    status = file.stat()
    return _FileStamp(
        str(file), status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns
    )


def _read(cached: Path) -> _FileStamp | None:
    """Return the cached stamp with its digest, None if there is none that can be read."""
    try:
        return msgspec.json.decode(cached.read_bytes(), type=_FileStamp)
    except (OSError, ValueError, msgspec.MsgspecError):
        return None


def _write(cached: Path, stamp: _FileStamp) -> None:
    """Write a digest to the cache; if that fails, the next start reads the file again."""
    try:
        write_whole(cached, msgspec.json.encode(stamp), folders=True, private=True)
    except OSError as error:
        log.warning(
            "%s cannot be written (%s); the next start reads the weights again", cached, error
        )


# -------------------------------------------------------------------------------- adapter identity
# Identity of an engine's LoRA adapters: a digest over everything that changes their requests' KV.
#
# The digest covers an adapter's files and the few settings with which vLLM derives different
# weights from them.  The base model's identity (``model_identity``) does not depend on adapters:
# requests without an adapter share their KV with engines that have no adapters.

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


#: Fields of vLLM's configuration that change KV, by sub-configuration; ``_model`` adds others.
KV_FIELDS = {
    "model_config": (
        "disable_sliding_window",
        "model_class_overrides",
        "quantization",
        "quantization_config",
    ),
    "cache_config": ("kv_cache_dtype_skip_layers", "kv_sharing_fast_prefill", "swa_bounded_replay"),
    "attention_config": ("hisparse_config", "indexer_kv_dtype", "use_non_causal"),
}
#: Fields of the multimodal configuration that change the KV of images.
IMAGE_FIELDS = (
    "language_model_only",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_save_margin",
    "mm_encoder_fp8_scale_save_path",
    "mm_encoder_only",
    "video_pruning_method",
    "video_pruning_rate",
)
#: Files that configure an engine's processing of images.
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
#: Environment variables of vLLM that change KV by more than rounding: activations in fewer bits,
#: simulated routing, a different form of attention or of its cache.
KV_VARIABLES = (
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
    "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MLA_DISABLE",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
    "VLLM_ROCM_USE_AITER_FP4BMM",
    "VLLM_ROCM_USE_AITER_FP8BMM",
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4",
    "VLLM_TEST_FORCE_LOAD_FORMAT",
    "VLLM_USE_DEEP_GEMM_E8M0",
)

#: Fields that transformers adds to a configuration: its path, commit and transformers' version.
_NOT_OF_THE_MODEL = frozenset({"_commit_hash", "_name_or_path", "transformers_version"})
_SAFETENSORS = ".safetensors"
_WEIGHT_SUFFIXES = (_SAFETENSORS, ".bin", ".pt", ".pth", ".gguf")
#: Load formats that read only the safetensors of a folder, if it has any.
_LOADS_SAFETENSORS = frozenset(
    {"auto", "fastsafetensors", "hf", "instanttensor", "runai_streamer", "safetensors"}
)
#: Load formats that may read any weight file of a folder.
_LOADS_FILES = frozenset({"mistral", "npcache", "pt", "runai_streamer_sharded", "sharded_state"})
#: Load format for random weights, which are the same on every machine.
_DUMMY = "dummy"
_COMMIT = re.compile("[0-9a-f]{40}")


def model_fingerprint(config: "VllmConfig") -> str:
    """Return the model's identity: its short name and a digest of all that its KV depends on.

    The digest does not depend on the model's path or on the engine; the name is for readers.  Reads
    all weights, once per machine.  Raises ``ConfigError`` if the weights cannot be identified.
    """
    model = config.model_config
    content: dict[str, Any] = {
        "model": _model(model, config.load_config),
        "settings": {
            part: {field: getattr(getattr(config, part), field) for field in fields}
            for part, fields in KV_FIELDS.items()
        },
        "platform": config.additional_config,
        "engram": config.engram_config,
        # Only the variables that this version of vLLM reads: 0.31 lacks one.
        "variables": {n: getattr(envs, n) for n in KV_VARIABLES if n in envs.environment_variables},
        "draft": _draft(config),
        "images": _images(config.model_config, config.load_config),
    }
    text = json.dumps(content, sort_keys=True, default=str)
    return f"{_name(model)}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def kv_layout(config: "VllmConfig", layer_names: Sequence[str]) -> str:
    """Return a name for the byte layout of a Layer Block, from the layers' attention backends.

    The CPU backend packs KV for the instruction set of the CPU.  vLLM's layout inside a block has
    no version, so vLLM's release is used: KV written with another release is not read.
    """
    device = current_platform.device_type
    packing = torch.backends.cpu.get_cpu_capability() if device == "cpu" else "native"
    layers = config.compilation_config.static_forward_context
    attention = {
        f"{layer.get_attn_backend().get_name()}.{layer.kv_cache_dtype}"
        for layer in (layers[name] for name in layer_names)
    }
    order = config.cache_config.get_resolved_kv_cache_layout().name
    release = vllm.__version__.split("+")[0]
    return f"{device}-{packing}-{'+'.join(sorted(attention))}-{order}-vllm{release}"


def _name(model: "ModelConfig") -> str:
    """Return the last part of a model's name, also if vLLM has replaced it by the hub's cache."""
    path = Path(model.model_weights or model.model)
    if path.parent.name == "snapshots":
        return path.parent.parent.name.rpartition("--")[2]
    return path.name


def _model(model: "ModelConfig", load: "LoadConfig") -> dict[str, Any]:
    """Return a model's architecture, configuration, weights and code, which determine its KV."""
    hf_config = model.hf_config.to_dict()
    return {
        "architecture": model.architecture,
        "config": {k: v for k, v in hf_config.items() if k not in _NOT_OF_THE_MODEL},
        "beyond_original_length": _beyond_original_length(model),
        "code": _code(model, load) if model.trust_remote_code else None,
        "weights": _weights(model, load),
    }


def _beyond_original_length(model: "ModelConfig") -> list[bool]:
    """Return which of its two sets of factors longrope uses: the longest context determines it.

    In vLLM all other kinds of RoPE scaling, dynamic NTK too, depend on the configuration only.
    """
    parameters = getattr(model.hf_text_config, "rope_parameters", None) or {}
    kinds = [parameters, *(each for each in parameters.values() if isinstance(each, dict))]
    return [
        model.max_model_len > kind["original_max_position_embeddings"]
        for kind in kinds
        if kind.get("rope_type") == "longrope"
    ]


def _draft(config: "VllmConfig") -> dict[str, Any] | None:
    """Return the draft model if its KV is stored with the target's; None without draft KV."""
    speculative = config.speculative_config
    if speculative is None or not speculative.uses_draft_kv_cache():
        return None
    return _model(speculative.draft_model_config, config.load_config)


def _images(model: "ModelConfig", load: "LoadConfig") -> dict[str, Any] | None:
    """Return what an image's KV depends on besides weights; None for text-only models."""
    multimodal = model.multimodal_config
    if multimodal is None:
        return None
    folder = _folder(model, load)
    files = [folder / name for name in _PROCESSOR_FILES] if folder is not None else []
    if multimodal.mm_encoder_fp8_scale_path:
        files.append(Path(multimodal.mm_encoder_fp8_scale_path))
    fields: dict[str, Any] = {field: getattr(multimodal, field) for field in IMAGE_FIELDS}
    return {**fields, "files": _digest(model, [file for file in files if file.is_file()])}


def _weights(model: "ModelConfig", load: "LoadConfig") -> str:
    if load.load_format == _DUMMY:
        return _DUMMY
    if model.model_weights:
        return f"{model.model_weights}@{model.revision}"  # an object store's URI
    if load.load_format in _LOADS_SAFETENSORS | _LOADS_FILES:
        if (folder := _folder(model, load)) is None:
            if _COMMIT.fullmatch(model.revision or ""):
                return f"{model.model}@{model.revision}"
        elif files := _weight_files(folder, str(load.load_format)):
            return f"sha256:{_digest(model, files)}"
    raise ConfigError(
        f"model {model.model!r} at revision {model.revision!r}, loaded as {load.load_format}: its "
        "weights are neither files of a folder nor of the hub's cache, so its stored KV could be "
        "confused with that of other weights; give --model a folder, or --revision a full commit "
        "hash, and --load-format auto"
    )


def _code(model: "ModelConfig", load: "LoadConfig") -> list[str | None]:
    """Return the revision and digest of the model's own Python code, which may compute layers."""
    folder = _folder(model, load)
    files = sorted(folder.glob("*.py")) if folder is not None and folder.is_dir() else []
    return [model.code_revision, _digest(model, files)]


def _digest(model: "ModelConfig", files: Iterable[Path]) -> str:
    try:
        return files_digest(files)
    except OSError as error:
        raise ConfigError(
            f"model {model.model!r}: {error}; its files must be readable, since their digest "
            "identifies stored KV"
        ) from error


def _folder(model: "ModelConfig", load: "LoadConfig") -> Path | None:
    """Return the folder (or the single file) of a model; None if it is not known."""
    if (path := Path(model.model)).exists():
        return path
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            model.model,
            revision=model.revision,
            cache_dir=load.download_dir,
            local_files_only=True,
        )
    except (OSError, ValueError):
        return None
    return Path(found)


def _weight_files(folder: Path, load_format: str) -> list[Path]:
    if folder.is_file():
        return [folder]
    files = [file for file in folder.iterdir() if file.suffix in _WEIGHT_SUFFIXES]
    safetensors = [file for file in files if file.suffix == _SAFETENSORS]
    return safetensors if safetensors and load_format in _LOADS_SAFETENSORS else files
