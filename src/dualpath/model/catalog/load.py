"""Reads the data files: by a name in the catalog or by the path of a file of one's own."""

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TypeVar

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.model.catalog.geometry import ModelGeometry
from dualpath.model.catalog.gpu import GpuRates
from dualpath.model.sim.settings import ClusterSettings

T = TypeVar("T")

MODELS = "models"
GPUS = "gpus"
CLUSTERS = "clusters"


def names(kind: str) -> tuple[str, ...]:
    """Return what the catalog holds of ``MODELS``, ``GPUS`` or ``CLUSTERS``, sorted."""
    files = (resources.files("dualpath.model.catalog") / kind).iterdir()
    return tuple(sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml")))


def load_model(name_or_path: str | Path) -> ModelGeometry:
    """Return a model's geometry; raises ``ConfigError`` for what cannot be found or is no model."""
    file = find(MODELS, name_or_path)
    geometry = parse(file, ModelGeometry)
    _checked(file, geometry)
    return geometry


def load_gpu(name_or_path: str | Path) -> GpuRates:
    """Return a GPU's rates; raises ``ConfigError``."""
    return parse(find(GPUS, name_or_path), GpuRates)


def load_cluster(name_or_path: str | Path) -> ClusterSettings:
    """Return a cluster; raises ``ConfigError`` that names file, value, limit and remedy."""
    file = find(CLUSTERS, name_or_path)
    return parse(file, ClusterSettings)


def find(kind: str, name_or_path: str | Path) -> Traversable:
    """Return the file meant: a path if it ends in ``.toml``, else a name in the catalog."""
    if str(name_or_path).endswith(".toml"):
        path = Path(name_or_path)
        if not path.is_file():
            raise ConfigError(
                f"there is no file {path}; give a TOML file or one of {', '.join(names(kind))}"
            )
        return path
    known = names(kind)
    if str(name_or_path) not in known:
        raise ConfigError(
            f"{name_or_path!r} is not among the catalog's {kind}: {', '.join(known)}; "
            "choose one or give a path that ends in .toml"
        )
    return resources.files("dualpath.model.catalog") / kind / f"{name_or_path}.toml"


def parse(file: Traversable, kind: type[T]) -> T:
    """Decode a TOML file; raises ``ConfigError`` naming the file and what is wrong in it."""
    try:
        return msgspec.toml.decode(file.read_bytes(), type=kind)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; check its rights") from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        # A ValidationError is a DecodeError and names the key; ValueError: no UTF-8, a date that
        # is none; RecursionError: nested too deep.
        raise ConfigError(f"{file}: {error}; correct the file") from error


def _checked(file: Traversable, value: ModelGeometry | ClusterSettings) -> None:
    try:
        value.check()
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
