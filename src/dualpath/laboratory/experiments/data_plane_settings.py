"""What the data-plane experiment is asked to do, and what its parts return."""

import enum

import msgspec

from dualpath.core.blocks import BlockGeometry
from dualpath.core.errors import ConfigError
from dualpath.engine.settings import DEFAULT_PARALLEL_READS


class Reader(enum.StrEnum):
    """Who reads stored Full Blocks."""

    FIO = "fio, libaio"
    """Reads and forgets; verifies nothing."""
    NIXL = "raw NIXL POSIX, libaio"
    """Into registered memory; verifies nothing."""
    READ_QUEUE = "dualpath read queue"
    """Into slots of the registered buffer, each block verified by its checksum."""


class Mover(enum.StrEnum):
    """Who moves Layer Blocks."""

    NIXL_AS_IT_COMES = "raw NIXL, as it comes"
    """Its progress thread never sleeps, UCX's own defaults."""
    NIXL = "raw NIXL, our UCX settings"
    TRAFFIC_MANAGER = "dualpath traffic manager"
    """Forward passes that compute nothing: plan, pump, counters and all."""


class Leg(enum.StrEnum):
    """Which way; the PE starts both."""

    DE_TO_PE = "DE buffer to PE HBM (READ)"
    """Hit blocks that the DE has read."""
    PE_TO_DE = "PE HBM to DE buffer (WRITE)"
    """New blocks."""


class DataPlaneSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One data-plane experiment.

    Full Blocks of ``layers`` Layer Blocks of ``layer_block_bytes``; 42 KiB are DeepSeek's 64 tokens
    of 672 bytes.  ``storage`` is a directory on the disk to measure: ``stored_blocks`` are written
    there, read cold, and removed: by the yardsticks ``read_batch_blocks`` at a time, by dualpath
    ``parallel_reads`` at a time.  ``blocks`` is the prompt, in Full Blocks, whose Layer Blocks are
    moved over ``tls``, for at least ``move_s`` seconds.  ``descriptor_counts`` are the pieces of
    single transfers.  Readers and movers take turns in each of ``rounds``; reported are medians.

    In a shell on a node of a lab (``dualpath lab run``) the same reads pass its throttle.
    """

    storage: str
    layers: int = 61
    layer_block_bytes: int = 43008
    stored_blocks: int = 200
    read_batch_blocks: int = 16
    parallel_reads: int = DEFAULT_PARALLEL_READS
    blocks: int = 100
    tls: str = "tcp"
    move_s: float = 1.5
    descriptor_counts: tuple[int, ...] = (1, 10, 100, 1000, 10000)
    rounds: int = 3

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for sizes nothing can be measured with."""
        least = {
            "layers": 2,
            "layer_block_bytes": 1,
            "stored_blocks": 1,
            "read_batch_blocks": 1,
            "parallel_reads": 1,
            "blocks": 2,
            "rounds": 1,
        }
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; it must be at least {smallest}"
                )
        if not self.storage:
            raise ConfigError("storage is missing; give a directory on the disk to measure")
        if not self.move_s > 0:
            raise ConfigError(f"move_s is {self.move_s}; it must be above 0")
        if not self.descriptor_counts or min(self.descriptor_counts) < 1:
            raise ConfigError(
                f"descriptor_counts are {self.descriptor_counts}; give at least one, each above 0"
            )

    @property
    def geometry(self) -> BlockGeometry:
        """The blocks; how many tokens one holds does not matter here."""
        return BlockGeometry(
            layers=self.layers, block_tokens=64, layer_block_bytes=self.layer_block_bytes
        )


class Rate(msgspec.Struct, frozen=True):
    """What one run moved: its rate, and the CPU time of all processes that took part."""

    bytes_per_s: float
    cpu_s_per_gb: float


class PostCost(msgspec.Struct, frozen=True):
    """What one posted transfer of ``pieces`` pieces costs the thread that posts it, in seconds.

    The steps of ``Transport.post``: our checks of both lists of pieces, making NIXL's handle from
    prepared descriptors, posting it.  Over TCP posting includes sending the bytes.
    """

    pieces: int
    check_s: float
    make_s: float
    post_s: float

    @property
    def descriptor_us(self) -> float:
        """Checks and handle, in µs per piece."""
        return (self.check_s + self.make_s) / self.pieces * 1e6
