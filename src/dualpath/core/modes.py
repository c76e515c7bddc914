"""The modes of §7: baselines, ablation steps and the full system; and the ways of a hand-over."""

import enum


class Mode(enum.StrEnum):
    """The enabled features; every step of the ablation (§7.5) adds one to the step before."""

    BASIC = "basic"
    """Reads on the PE only, all layers in HBM, load before compute and send after it."""
    LAYERWISE = "layerwise"
    """Basic plus layerwise prefill."""
    ROUND_ROBIN = "round-robin"
    """Layerwise plus dual-path loading; engines and read sides are chosen round robin."""
    DUALPATH = "dualpath"
    """The data path of round-robin with the scheduler of §6."""
    SPLIT = "split"
    """DualPath that also splits the reads of one request between both sides (§6.1, future work)."""
    ORACLE = "oracle"
    """No reads and no transfers, only lengths; generated text is meaningless (§7.2)."""

    @property
    def layerwise(self) -> bool:
        """Whether the PE has only a few layers of KV in HBM and overlaps transfers."""
        return self is not Mode.BASIC

    @property
    def dual_path(self) -> bool:
        """Whether the DE side may read."""
        return self in (Mode.ROUND_ROBIN, Mode.DUALPATH, Mode.SPLIT)

    @property
    def compute_quota(self) -> bool:
        """Whether PEs batch by the compute quota (§6.2; §A.4 sets it for DualPath and Oracle)."""
        return self in (Mode.DUALPATH, Mode.SPLIT, Mode.ORACLE)

    @property
    def moves_bytes(self) -> bool:
        """Whether KV is transferred; False only for Oracle."""
        return self is not Mode.ORACLE


class Handover(enum.StrEnum):
    """Where the DE receives a prompt's KV: a setting, and with ``AUTO`` a decision per request."""

    BUFFER = "buffer"
    """In its DRAM buffer, from where it is copied into HBM once the prompt is complete (§4.1)."""
    HBM = "hbm"
    """In its HBM, which it allocates when the request is assigned."""
    AUTO = "auto"
    """In its HBM where that is free, else in its buffer."""


#: With both storage NICs used by each request it was at least as fast as the paper's rule wherever
#: both were measured (``docs/measured.md``, ``benchmarks``).
DEFAULT_MODE = Mode.SPLIT
