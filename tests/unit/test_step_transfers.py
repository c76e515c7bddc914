"""A prompt's blocks become a work list once, however many layers are moved by it."""

from dualpath.core.blocks import BlockGeometry
from dualpath.core.cluster import Role
from dualpath.core.runs import BlockRun
from dualpath.engine.buffer.block_buffer import BUFFER_REGION
from dualpath.engine.counters import Counters
from dualpath.engine.passes.device import HostDevice
from dualpath.engine.passes.hbm_layout import PartViews, shared_layers
from dualpath.engine.passes.step_transfers import StepTransfers
from dualpath.plan.movements import LOAD_FROM_PE_BUFFER
from dualpath.plan.steps import step_of
from dualpath.transport.contract import Direction, PieceIndices, RegionInfo
from dualpath.transport.copy_transport import CopyTransfer
from dualpath.transport.in_process import InProcessFabric, InProcessTransport

LAYERS, BLOCK_BYTES, BLOCKS = 3, 64, 8
GEOMETRY = BlockGeometry.uniform(LAYERS, 1, BLOCK_BYTES)


class Noting(InProcessTransport):
    """Records posted work lists without moving bytes."""

    def __init__(self) -> None:
        super().__init__("engine", InProcessFabric())
        self.lists: list[tuple[PieceIndices, PieceIndices]] = []

    def post(
        self,
        direction: Direction,
        local_region: str,
        local_pieces: PieceIndices,
        agent: str,
        remote_region: str,
        remote_pieces: PieceIndices,
        *,
        traffic_class: str = "kv",
    ) -> CopyTransfer:
        self.lists.append((local_pieces, remote_pieces))
        return super().post(direction, local_region, (), agent, local_region, ())


def test_all_layers_of_a_prompt_are_moved_by_the_same_work_lists() -> None:
    transport = Noting()
    hbm = RegionInfo("hbm", 1 << 20, BLOCK_BYTES, BLOCK_BYTES, BLOCKS)
    size_bytes = GEOMETRY.full_block_bytes
    buffer = RegionInfo(BUFFER_REGION, 1 << 30, size_bytes, size_bytes, BLOCKS)
    layout = shared_layers([hbm], GEOMETRY, BLOCKS)
    for region in (hbm, buffer):
        transport.register(region, None)
    for view in PartViews(GEOMETRY, layout).of(buffer):
        transport.view(view)
    transfers = StepTransfers(Role.PREFILL, transport, HostDevice(), Counters(), "engine", layout)
    for layer in range(LAYERS):
        slots = tuple(int(slot) for slot in "52")  # equal in each layer, and not the same object
        step = step_of(LOAD_FROM_PE_BUFFER, GEOMETRY, BlockRun(1, 2), layer, slots)
        transfers.post(step, (7, 3, 4))
    first, *others = transport.lists
    assert sorted(map(list, first)) == [[3, 4], [5, 2]]
    assert all(mine is its for other in others for mine, its in zip(first, other, strict=True))
