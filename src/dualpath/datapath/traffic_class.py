"""Traffic classes of §5.1: model communication goes first, KV takes what is left."""

import enum


class TrafficClass(enum.StrEnum):
    """Who may wait for whom."""

    INFERENCE = "inference"
    """Collectives of model execution; no step of a plan ever uses it."""
    KV = "kv"
    """KV-cache on the compute network, host-device copies included (§5.2)."""
    STORAGE_READ = "storage-read"
    """Hit blocks on the storage network; a request waits for them."""
    STORAGE_WRITE = "storage-write"
    """New blocks on the storage network; nobody waits for them, they yield to reads."""
