"""Settings of a scheduler's process that a router does not have."""

from typing import Annotated

import msgspec

from dualpath.core.settings import Setting, Settings


class SchedulerAddress(Settings, frozen=True):
    """Where a scheduler answers what is asked of its cluster."""

    host: Annotated[str, Setting("address of the HTTP server")] = "127.0.0.1"
    port: Annotated[int, Setting("of the HTTP server; 0: any free one", ge=0, le=65535)] = 8001
    lora_modules: Annotated[
        dict[str, str],
        Setting(
            "LoRA adapters that requests may name as model, the same for front ends and engines",
            metavar="NAME=PATH,…",
        ),
    ] = msgspec.field(default_factory=dict)
