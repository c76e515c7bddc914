"""Lets vLLM's kernels for CPUs use AMX from an engine's first pass on.

Linux lends AMX's tile registers to processes that have asked for them; for others their first
instruction on a tile is an illegal one.  vLLM 0.32 does not ask: oneDNN does so with the first
product of matrices that it is given.  A plain engine's first pass is a prompt, and that is early
enough.  A DE's first pass may be one token, whose products with small weights are no work for
oneDNN, and the attention after them would end the process.
"""

import logging

import torch

log = logging.getLogger(__name__)


def allow_tiles(device: torch.device) -> None:
    """Ask for the tile registers where ``device`` is a CPU that has them; idempotent.

    A kernel that refuses them is said, and no error: only some dtypes need tiles.
    """
    if device.type != "cpu" or not torch.cpu._is_amx_tile_supported():
        return
    if not torch.cpu._init_amx():
        log.warning(
            "this CPU has AMX and the operating system does not lend its tile registers; if the "
            "engine ends with SIGILL, start it with --dtype float32"
        )
