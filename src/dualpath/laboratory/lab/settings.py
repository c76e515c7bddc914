"""What a lab is asked to be: nodes, rates of their links, lanes, storage."""

import enum
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.plan.traffic_class import LaneWeights, PortRange, parse_ports, parse_weights

MOST_NODES = 64
_GIB = 1 << 30


class Shaping(enum.StrEnum):
    """Who shapes the links of a lab."""

    AUTO = "auto"
    """The first of the others that this machine and user allow."""
    ROOT = "root"
    """The kernel: network namespaces with HTB, and cgroups that throttle block devices."""
    USER_NAMESPACES = "user-namespaces"
    """The kernel for the network, in namespaces an ordinary user may make; not for storage."""
    TOKEN_BUCKETS = "token-buckets"
    """Nobody but the engines themselves, for storage reads."""


class StorageServer(enum.StrEnum):
    """What serves the storage of a lab."""

    NONE = "none"
    """Nothing: nodes read its folder, through cgroups that throttle them."""
    S3 = "s3"
    """An S3 server, which each node reaches over a shaped link."""


class LabSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One lab; the keys of its TOML file.

    ``name`` distinguishes labs of one machine.  Rates are those of a node and of either direction:
    ``cnic_bytes_per_s`` between nodes, ``loopback_bytes_per_s`` of a node to itself (the place of
    H2D copies; 0: as the CNIC), ``snic_bytes_per_s`` of reads from storage.  The defaults are
    the paper's testbed, where one SNIC serves eight CNICs, at a scale that two cores can drive.

    ``ratio`` and ``kv_ports`` are the lanes of ``plan.traffic_class``.  ``storage`` is a
    folder on a disk of this machine; without one, a file system of ``image_bytes`` is made in
    memory.  ``storage_server`` is what serves it.
    """

    name: str = "lab"
    prefill: int = 1
    decode: int = 1
    cnic_bytes_per_s: float = 400e6
    loopback_bytes_per_s: float = 0.0
    snic_bytes_per_s: float = 50e6
    ratio: str = "99:1"
    kv_ports: str = "20480-24575"
    mtu_bytes: int = 9000
    storage: str = ""
    storage_server: StorageServer = StorageServer.NONE
    image_bytes: int = _GIB
    shaping: Shaping = Shaping.AUTO

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for the first setting that no lab can have."""
        if not re.fullmatch(r"[a-z][a-z0-9]{0,15}", self.name):
            raise ConfigError(
                f"name is {self.name!r}, must be up to 16 small letters and digits, a letter first"
            )
        limits: dict[str, tuple[float, float]] = {
            "prefill": (1, MOST_NODES - 1),
            "decode": (1, MOST_NODES - 1),
            "cnic_bytes_per_s": (1e6, 12.5e9),
            "snic_bytes_per_s": (1e6, 12.5e9),
            "mtu_bytes": (1280, 65535),
            "image_bytes": (16 << 20, 1 << 40),
        }
        if self.loopback_bytes_per_s:
            limits["loopback_bytes_per_s"] = (1e6, 12.5e9)
        for field, (least, most) in limits.items():
            value = getattr(self, field)
            if not least <= value <= most:
                raise ConfigError(
                    f"{field} is {value:g}, must be between {least:g} and {most:g}; correct it"
                )
        if self.prefill + self.decode > MOST_NODES:
            raise ConfigError(
                f"{self.shape} has {self.prefill + self.decode} nodes, must be at most "
                f"{MOST_NODES}; take fewer"
            )
        parse_weights(self.ratio)
        parse_ports(self.kv_ports)

    @property
    def shape(self) -> str:
        """The nodes as the paper writes them."""
        return f"{self.prefill}P{self.decode}D"

    @property
    def weights(self) -> LaneWeights:
        """Shares of the lanes."""
        return parse_weights(self.ratio)

    @property
    def ports(self) -> PortRange:
        """TCP ports of the KV lane."""
        return parse_ports(self.kv_ports)

    @property
    def loopback_rate_bytes_per_s(self) -> float:
        """Rate of a node to itself."""
        return self.loopback_bytes_per_s or self.cnic_bytes_per_s


def parse_shape(text: str) -> tuple[int, int]:
    """Return prefill and decode nodes of ``"2P4D"``; raises ``ConfigError`` for anything else."""
    match = re.fullmatch(r"\s*(\d{1,4})[Pp](\d{1,4})[Dd]\s*", text)
    if not match:
        raise ConfigError(f"nodes are {text!r}, must be numbers of both roles like 1P2D")
    return int(match[1]), int(match[2])


def load_settings(
    file: str = "",
    changes: dict[str, Any] | None = None,
    defaults: dict[str, Any] | None = None,
) -> LabSettings:
    """Return the settings of a TOML file with ``changes`` made to them; ``defaults`` are weaker.

    Raises ``ConfigError`` that names the key, the value and what is allowed.
    """
    values: dict[str, Any] = {}
    if file:
        try:
            values = tomllib.loads(Path(file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"settings {file!r} cannot be read ({error}); correct it") from error
    try:
        return msgspec.convert({**(defaults or {}), **values, **(changes or {})}, LabSettings)
    except msgspec.ValidationError as error:
        known = ", ".join(field.name for field in msgspec.structs.fields(LabSettings))
        raise ConfigError(f"lab settings: {error}; known keys are {known}") from error
