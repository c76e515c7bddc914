"""Monotonic counters of an engine; it reports them, and the router exports them as metrics."""

from enum import StrEnum

from dualpath.engine.threads import OS_THREADS, Threads
from dualpath.plan import movements
from dualpath.plan.movements import Place
from dualpath.plan.steps import Step


class Counter(StrEnum):
    """The counters; the value is the name on the wire.

    A counter with a ``help`` text is a metric of the router, ``dualpath:METRIC_total``; bytes by
    step of Fig. 4 are labels of one metric (``router/observe/engine_metrics.py:MOVEMENTS``).
    """

    help: str
    metric: str

    def __new__(cls, name: str, help: str = "", metric: str = "") -> "Counter":
        """Create a member; ``metric`` if it differs from the name on the wire."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.help, member.metric = help, metric or name
        return member

    STORAGE_READ_BYTES = "storage_read_bytes", "Bytes read from storage.", "snic_read_bytes"
    STORAGE_WRITE_BYTES = "storage_write_bytes", "Bytes written to storage.", "snic_write_bytes"
    H2D_BYTES = "h2d_bytes"
    PE_TO_DE_BYTES = "pe_to_de_bytes"
    DE_TO_PE_BYTES = "de_to_pe_bytes"
    #: Prompts that a DE has moved from another DE.
    DE_TO_DE_BYTES = "de_to_de_bytes"
    D2H_BYTES = "d2h_bytes"
    # The bytes of ``pe_to_de`` and ``de_to_pe`` by kind of movement (``plan.movements``).
    PE_HIT_BYTES = "pe_hit_bytes"
    MISS_BYTES = "miss_bytes"
    DE_HIT_BYTES = "de_hit_bytes"
    RELOAD_BYTES = "reload_bytes"
    LOADED_BLOCKS = "loaded_blocks", "Blocks loaded into a prefill engine's HBM."
    PERSISTED_BLOCKS = "persisted_blocks", "Full Blocks newly written to storage."
    PERSIST_DROPPED_BLOCKS = "persist_dropped_blocks", "Blocks not persisted."
    VERIFY_FAILURES = (
        "verify_failures",
        "Reads that ended at a block that was missing, short or failed its checksum.",
    )
    STORAGE_EVICTED_BLOCKS = (
        "storage_evicted_blocks",
        "Stored blocks evicted to keep the storage within its limits.",
    )
    STORAGE_EVICTED_BYTES = (
        "storage_evicted_bytes",
        "Bytes of stored blocks evicted to keep the storage within its limits.",
    )
    STORAGE_REFUSED_BLOCKS = (
        "storage_refused_blocks",
        "New blocks not stored because a quota of the storage is used up.",
    )
    STORAGE_SKIPPED_BLOCKS = (
        "storage_skipped_blocks",
        "New blocks not stored because of the write rate cap or the filter.",
    )
    DRAM_HIT_BLOCKS = (
        "dram_hit_blocks",
        "Blocks of requests found in the engine's DRAM cache, or in the one its node shares.",
    )
    DRAM_HIT_BYTES = "dram_hit_bytes", "Bytes of dram_hit_blocks."
    NODE_DRAM_READ_BYTES = (
        "node_dram_read_bytes",
        "Bytes read from the DRAM cache that engines of a node share, instead of from storage.",
    )
    NODE_DRAM_EVICTED_BLOCKS = (
        "node_dram_evicted_blocks",
        "Blocks that an engine evicted from the DRAM cache that engines of its node share.",
    )
    DRAM_FETCHED_BLOCKS = (
        "dram_fetched_blocks",
        "Blocks prefetched into an engine's buffer.",
    )
    DRAM_EVICTED_BLOCKS = (
        "dram_evicted_blocks",
        "Blocks evicted from an engine's DRAM cache.",
    )
    READ_DEADLINES = "read_deadlines", "Storage reads that missed their deadline."
    LOOKUPS = "lookups", "Look-ups that an engine has started."
    LOOKUP_PROBES = "lookup_probes", "Storage queries of look-ups, one block each."
    TRANSFER_FAILURES = "transfer_failures", "Requests with a failed KV transfer."
    STALE_TRANSFERS = (
        "stale_transfers",
        "Transfers refused because their buffer slots belonged to another request by then.",
    )
    VERIFIED_LAYER_BLOCKS = (
        "verified_layer_blocks",
        "Layer Blocks compared with their expected content (emulated engines only).",
    )
    WRONG_LAYER_BLOCKS = (
        "wrong_layer_blocks",
        "Layer Blocks that differed from their expected content (emulated engines only).",
    )


#: Counters that only emulated engines report.
OF_EMULATED_ENGINES = (Counter.VERIFIED_LAYER_BLOCKS, Counter.WRONG_LAYER_BLOCKS)


#: The counters to which the bytes of a step are added, by the step's label.
BYTES_OF: dict[str, tuple[Counter, ...]] = {
    movements.READ_TO_PE.label: (Counter.STORAGE_READ_BYTES,),
    movements.READ_TO_DE.label: (Counter.STORAGE_READ_BYTES,),
    movements.LOAD_FROM_PE_BUFFER.label: (Counter.H2D_BYTES,),
    movements.LOAD_FROM_DE_BUFFER.label: (Counter.DE_TO_PE_BYTES, Counter.DE_HIT_BYTES),
    movements.RELOAD_CHUNK.label: (Counter.DE_TO_PE_BYTES, Counter.RELOAD_BYTES),
    movements.SEND_HITS.label: (Counter.PE_TO_DE_BYTES, Counter.PE_HIT_BYTES),
    movements.SEND_MISSES.label: (Counter.PE_TO_DE_BYTES, Counter.MISS_BYTES),
    movements.MOVE_PROMPT.label: (Counter.DE_TO_DE_BYTES,),
    movements.FILL_DE_HBM.label: (Counter.H2D_BYTES,),
    movements.PERSIST_PROMPT.label: (Counter.STORAGE_WRITE_BYTES,),
    movements.STAGE_GENERATED.label: (Counter.D2H_BYTES,),
    movements.PERSIST_GENERATED.label: (Counter.STORAGE_WRITE_BYTES,),
}


class Counters:
    """Thread-safe totals, initially zero; those of emulated engines exist once they are used."""

    def __init__(self, threads: Threads = OS_THREADS) -> None:
        self._lock = threads.lock()
        self._totals: dict[str, float] = {
            name.value: 0 for name in Counter if name not in OF_EMULATED_ENGINES
        }

    def add(self, name: Counter, amount: float) -> None:
        """Add a non-negative amount."""
        key = name._value_
        with self._lock:
            self._totals[key] = self._totals.get(key, 0) + amount

    def moved(self, step: Step, moved_bytes: int | None = None) -> None:
        """Count an executed step; ``moved_bytes`` if it moved other than the planned bytes."""
        for counter in BYTES_OF[step.label]:
            self.add(counter, step.bytes if moved_bytes is None else moved_bytes)
        if step.destination is Place.PE_HBM and step.layer == 0:
            self.add(Counter.LOADED_BLOCKS, step.blocks.count)

    def snapshot(self) -> dict[str, float]:
        """Return a copy of all totals."""
        with self._lock:
            return dict(self._totals)
