"""Reads the data files: by a name in the catalog or by the path of a file of one's own."""

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.core.settings import Setting
from dualpath.node.home import with_home
from dualpath_sim.catalog.families import KvCacheDtype, decode_config, geometry_of
from dualpath_sim.catalog.geometry import ModelGeometry
from dualpath_sim.catalog.gpu import GpuRates
from dualpath_sim.simulator.settings import ClusterSettings, ModelCosts

CostsName = Annotated[
    str,
    Setting(
        "model that determines the times of forward passes: a catalog model, a folder with a "
        "config.json, or costs measured by `dualpath profile`",
        metavar="NAME|FOLDER|COSTS.toml",
    ),
]
GpuName = Annotated[str, Setting("GPU that runs a catalog model", metavar="NAME")]


T = TypeVar("T")

MODELS = "models"
GPUS = "gpus"
CLUSTERS = "clusters"
_SUFFIXES = (".toml", ".json")


def names(kind: str) -> tuple[str, ...]:
    """Return what the catalog holds of ``MODELS``, ``GPUS`` or ``CLUSTERS``, sorted."""
    files = (resources.files("dualpath_sim.catalog") / kind).iterdir()
    return tuple(sorted(f.name.rpartition(".")[0] for f in files if f.name.endswith(_SUFFIXES)))


def load_model(name_or_path: str | Path, kv_cache_dtype: KvCacheDtype = "auto") -> ModelGeometry:
    """Return a model's geometry; raises ``ConfigError`` if none is found under that name.

    The type of the KV-cache can be chosen for a ``config.json`` only; a TOML file states it.
    """
    loaded = load_described(name_or_path, kv_cache_dtype)
    if isinstance(loaded, ModelCosts):
        raise ConfigError(
            f"{name_or_path} holds measured costs, which have no dimensions; give a model's "
            "geometry or its config.json"
        )
    return loaded


def load_described(
    name_or_path: str | Path, kv_cache_dtype: KvCacheDtype = "auto"
) -> ModelGeometry | ModelCosts:
    """Return what a file describes: a model's geometry, or costs that were measured.

    Raises ``ConfigError``.
    """
    file = find(MODELS, name_or_path)
    if file.name.endswith(".json"):
        return _published(file, kv_cache_dtype)
    if kv_cache_dtype != "auto":
        raise ConfigError(
            f"{{kv_cache_dtype}} is {kv_cache_dtype}, but {file} states how KV is stored; "
            "leave {kv_cache_dtype} out or change the file"
        )
    if "attention" not in parse(file, dict):
        return parse(file, ModelCosts)
    geometry = parse(file, ModelGeometry)
    _checked(file, geometry)
    return geometry


def kv_heads(name_or_path: str | Path) -> int:
    """Return how many KV heads a model has, which the ranks of an engine share out.

    Latent KV is one head; 1 as well where layers differ, and for measured costs, which lack it.
    Raises ``ConfigError``.
    """
    loaded = load_described(name_or_path)
    if isinstance(loaded, ModelCosts):
        return 1
    heads = {part.slices(part.heads) for part in loaded.attention}
    return heads.pop() if len(heads) == 1 else 1


def _published(file: Traversable, kv_cache_dtype: KvCacheDtype) -> ModelGeometry:
    """Read a ``config.json``; the model is called like its folder, any other file's like it."""
    stem = file.name.removesuffix(".json")
    name = Path(str(file)).resolve().parent.name if stem == "config" else stem
    with _named(file):
        return geometry_of(decode_config(file.read_bytes()), name, kv_cache_dtype)


def load_gpu(name_or_path: str | Path) -> GpuRates:
    """Return a GPU's rates; raises ``ConfigError``."""
    return parse(find(GPUS, name_or_path), GpuRates)


def load_cluster(name_or_path: str | Path) -> ClusterSettings:
    """Return a cluster; raises ``ConfigError`` that names file, value, limit and remedy."""
    file = find(CLUSTERS, name_or_path)
    return parse(file, ClusterSettings)


def find(kind: str, name_or_path: str | Path) -> Traversable:
    """Return the file meant: a path to a file or a folder with a ``config.json``, else a name.

    What ends in ``.toml`` or ``.json``, or has a slash, is a path; raises ``ConfigError``.
    """
    text, path = str(name_or_path), Path(with_home(str(name_or_path)))
    is_path = "/" in text or text in (".", "..")
    if not is_path and not text.endswith(_SUFFIXES if kind == MODELS else ".toml"):
        return _named_file(kind, text)
    try:
        if kind == MODELS and is_path and stat.S_ISDIR(path.stat().st_mode):
            path /= "config.json"
        reason = "" if stat.S_ISREG(path.stat().st_mode) else " (it is no regular file)"
    except OSError as error:
        reason = f" ({error.strerror})"
    if reason:
        what = "a TOML file, a config.json" if kind == MODELS else "a TOML file"
        known = ", ".join(names(kind))
        raise ConfigError(f"there is no file {path}{reason}; give {what} or one of {known}")
    return path


def _named_file(kind: str, name: str) -> Traversable:
    if name not in names(kind):
        paths = "in .toml or .json, or a folder like ./MODEL" if kind == MODELS else "in .toml"
        raise ConfigError(
            f"{name!r} is not among the catalog's {kind}: {', '.join(names(kind))}; "
            f"choose one or give a path that ends {paths}"
        )
    folder = resources.files("dualpath_sim.catalog") / kind
    toml = folder / f"{name}.toml"
    return toml if toml.is_file() else folder / f"{name}.json"


def parse(file: Traversable, kind: type[T]) -> T:
    """Decode a TOML file; raises ``ConfigError`` naming the file and what is wrong in it."""
    with _named(file):
        return msgspec.toml.decode(file.read_bytes(), type=kind)


@contextmanager
def _named(file: Traversable) -> Iterator[None]:
    """Turn whatever is wrong with a file into a ``ConfigError`` that names it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; check its rights") from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        # A ValidationError is a DecodeError and names the key; ValueError: no UTF-8, a date that
        # is none; RecursionError: nested too deep.
        raise ConfigError(f"{file}: {error}; correct the file") from error


def _checked(file: Traversable, value: ModelGeometry | ClusterSettings) -> None:
    with _named(file):
        value.check()
