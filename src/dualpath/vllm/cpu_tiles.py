"""Enables AMX for vLLM's CPU kernels before an engine's first pass.

Linux grants the AMX tile registers to a process on request; without it, a tile instruction ends the
process with SIGILL.  vLLM 0.32 does not request them; oneDNN does at its first matrix product.  A
plain engine's first pass is a prompt, whose products go through oneDNN before its attention.  A
DE's first pass may be one token, whose small products do not go through oneDNN, and the attention
after them would end the process.
"""

import logging

import torch

log = logging.getLogger(__name__)


def enable_amx_tiles(device: torch.device) -> None:
    """Request the tile registers if ``device`` is a CPU that has them; idempotent.

    If Linux refuses them, a warning is logged and no error raised: only some dtypes need tiles.
    """
    if device.type != "cpu" or not torch.cpu._is_amx_tile_supported():
        return
    if not torch.cpu._init_amx():
        log.warning(
            "this CPU has AMX, but the operating system does not grant its tile registers; if the "
            "engine ends with SIGILL, start it with --dtype float32"
        )
