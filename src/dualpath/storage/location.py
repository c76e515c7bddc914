"""Parses a storage location: the kind of storage, and its path or bucket."""

from pathlib import Path

from dualpath.core.errors import ConfigError

#: NIXL's file plugins, by URL scheme.
FILE_PLUGINS = {
    "nixl+posix": "POSIX",
    "nixl+gds": "GDS",
    "nixl+gds_mt": "GDS_MT",
    "nixl+hf3fs": "HF3FS",
}
DIRECTORIES = frozenset({"file", *FILE_PLUGINS})
#: The scheme of a bucket that NIXL's plugin OBJ reads, and all schemes of buckets.
OBJECT_PLUGIN = "nixl+obj"
BUCKETS = frozenset({"s3", OBJECT_PLUGIN})
MEMORY = "memory"


def split_location(location: str | Path) -> tuple[str, str]:
    """Return scheme and path of a location; raises ``ConfigError`` for an unknown scheme."""
    scheme, separator, rest = str(location).partition("://")
    if not separator:
        scheme, rest = "file", str(location)
    if scheme not in {MEMORY, *DIRECTORIES, *BUCKETS} or not rest:
        plugins = ", ".join(f"{name}://PATH" for name in FILE_PLUGINS)
        raise ConfigError(
            f"storage location {str(location)!r} is none of PATH, file://PATH, "
            f"s3://BUCKET/PREFIX, memory://NAME, {plugins}, {OBJECT_PLUGIN}://BUCKET/PREFIX"
        )
    return scheme, rest


def directory_of(location: str) -> Path | None:
    """Return the directory of a storage, None if the storage is not a directory."""
    scheme, separator, rest = location.partition("://")
    if not separator:
        return Path(location)
    return Path(rest) if scheme in DIRECTORIES else None
