"""What a storage's location says: which kind of storage, and where."""

from pathlib import Path

from dualpath.core.errors import ConfigError

#: NIXL's plugins that read files, by the scheme of a directory that one is to read.
FILE_PLUGINS = {
    "nixl+posix": "POSIX",
    "nixl+gds": "GDS",
    "nixl+gds_mt": "GDS_MT",
    "nixl+hf3fs": "HF3FS",
}
DIRECTORIES = frozenset({"file", *FILE_PLUGINS})
#: The bucket that NIXL's plugin OBJ reads, and any bucket.
OBJECT_PLUGIN = "nixl+obj"
BUCKETS = frozenset({"s3", OBJECT_PLUGIN})
MEMORY = "memory"


def parted(location: str | Path) -> tuple[str, str]:
    """Return scheme and what it is of; raises ``ConfigError`` for a location that is none."""
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
    """Return the directory in which a storage lies, None if it lies in none."""
    scheme, separator, rest = location.partition("://")
    if not separator:
        return Path(location)
    return Path(rest) if scheme in DIRECTORIES else None
