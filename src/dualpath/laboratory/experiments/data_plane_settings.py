"""Settings of the data-plane experiment, and the results of its parts."""

import enum
from typing import Annotated

import msgspec

from dualpath.core.blocks import BlockGeometry
from dualpath.core.errors import ConfigError
from dualpath.core.settings import Setting, Settings
from dualpath.engine.settings import DEFAULT_PARALLEL_READS
from dualpath.laboratory.experiments.settings import Repeat


class Reader(enum.StrEnum):
    """The compared ways to read stored Full Blocks."""

    FIO = "fio, libaio"
    """Discards the data; verifies nothing."""
    NIXL = "raw NIXL POSIX, libaio"
    """Into registered memory; verifies nothing."""
    READ_QUEUE = "dualpath read queue"
    """Into slots of the registered buffer, each block verified by its checksum."""


class Mover(enum.StrEnum):
    """The compared ways to transfer Layer Blocks."""

    NIXL_AS_IT_COMES = "raw NIXL, as it comes"
    """With UCX's defaults; its progress thread never sleeps."""
    NIXL = "raw NIXL, our UCX settings"
    TRAFFIC_MANAGER = "dualpath traffic manager"
    """Forward passes without computation: plan, pump and counters included."""


class Leg(enum.StrEnum):
    """The direction; the PE starts both."""

    DE_TO_PE = "DE buffer to PE HBM (READ)"
    """Hit blocks that the DE has read."""
    PE_TO_DE = "PE HBM to DE buffer (WRITE)"
    """New blocks."""


class DataPlaneSettings(Settings, frozen=True, kw_only=True):
    """One data-plane experiment.

    Full Blocks of ``layers`` Layer Blocks of ``layer_block_bytes``; 42 KiB are DeepSeek's 64 tokens
    of 672 bytes.  ``storage`` is a directory on the disk to measure:  ``stored_blocks`` are written
    there, read cold, and removed: by the baselines ``read_batch_blocks`` at a time, by dualpath
    ``parallel_reads`` at a time.  ``blocks`` is the prompt, in Full Blocks, whose Layer Blocks are
    transferred over ``tls``, for at least ``move_s`` seconds.  ``descriptor_counts`` are the pieces
    of single transfers.  Readers and movers run ``repeat`` times, interleaved; reported are
    medians.

    In a shell on a node of a lab (``dualpath lab run``) the reads are throttled by the lab.
    """

    storage: Annotated[str, Setting("directory on the disk to measure", metavar="DIR")]
    layers: Annotated[int, Setting("Layer Blocks of a Full Block", ge=2)] = 61
    layer_block_bytes: Annotated[int, Setting("bytes of a Layer Block", ge=1)] = 43008
    stored_blocks: Annotated[int, Setting("blocks to write, read cold and remove", ge=1)] = 200
    read_batch_blocks: Annotated[int, Setting("blocks read at a time by the baselines", ge=1)] = 16
    parallel_reads: Annotated[int, Setting("blocks read at a time by dualpath", ge=1)] = (
        DEFAULT_PARALLEL_READS
    )
    blocks: Annotated[int, Setting("Full Blocks of the transferred prompt", ge=2)] = 100
    tls: Annotated[str, Setting("UCX transports")] = "tcp"
    move_s: Annotated[float, Setting("minimum duration of transfers", gt=0)] = 1.5
    descriptor_counts: Annotated[tuple[int, ...], Setting("pieces of single transfers", ge=1)] = (
        1,
        10,
        100,
        1000,
        10000,
    )
    repeat: Repeat = 3

    def check(self) -> None:
        """Raise ``ConfigError`` for a missing directory or missing sizes."""
        super().check()
        if not self.storage:
            raise ConfigError("{storage} is missing; give a directory on the disk to measure")
        if not self.descriptor_counts:
            raise ConfigError("{descriptor_counts} is empty; give at least one")

    @property
    def geometry(self) -> BlockGeometry:
        """The geometry of the blocks; their number of tokens is arbitrary."""
        return BlockGeometry.uniform(
            layers=self.layers, block_tokens=64, layer_block_bytes=self.layer_block_bytes
        )


class Rate(msgspec.Struct, frozen=True):
    """The rate of one run, and the CPU time of all its processes."""

    bytes_per_s: float
    cpu_s_per_gb: float


class PostCost(msgspec.Struct, frozen=True):
    """Time of the posting thread for one transfer of ``pieces`` pieces, in seconds.

    The steps of ``Transport.post``: checking both lists of pieces, making NIXL's handle from
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
