"""Engines, roles and the shape of a cluster (§2.3, §4.2)."""

import enum

import msgspec


class Role(enum.StrEnum):
    """What an engine does; every group holds engines of one role (§6.1)."""

    PREFILL = "prefill"
    DECODE = "decode"


class ClusterShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The symbols of §4.2.

    ``prefill_nodes`` P, ``decode_nodes`` D, ``gpus_per_node`` g (one compute NIC each),
    ``cnic_bytes_per_s`` B, ``snic_ratio`` s (a node's storage NIC carries s·B),
    ``dram_bytes_per_s`` M per node.
    """

    prefill_nodes: int
    decode_nodes: int
    gpus_per_node: int
    cnic_bytes_per_s: float
    snic_ratio: float
    dram_bytes_per_s: float
