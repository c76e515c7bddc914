"""Small emulated engines, for clusters launched like those of vLLM."""

from dualpath_lab.emulated.commands import emulated_commands
from dualpath_lab.emulated.settings import EmulatedOptions

EMULATED = emulated_commands(
    EmulatedOptions(
        layers=4,
        kv_bytes_per_token=4096,
        block_tokens=16,
        hbm_bytes=16 << 20,
    )
)
