"""Settings of the router's HTTP front end; importing them does not import vLLM.

The annotated types are shared by all commands that start vLLM.
"""

from typing import Annotated

import msgspec

from dualpath.core.settings import Setting, Settings

Model = Annotated[str, Setting("folder or name of the model")]
Host = Annotated[str, Setting("address of the HTTP server", host=True)]
Port = Annotated[int, Setting("port of the HTTP server; 0: any free port", ge=0, le=65535)]
ServedNames = Annotated[
    tuple[str, ...],
    Setting("model names that clients may use; none: the model's own", metavar="NAME,…"),
]
MaxModelLen = Annotated[
    int | None, Setting("longest context in tokens; none: the model's own", ge=2, metavar="TOKENS")
]
Dtype = Annotated[
    str,
    Setting(
        "dtype of weights and KV, the same for router and engines",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
    ),
]
LoraModules = Annotated[
    dict[str, str],
    Setting(
        "LoRA adapters that requests may name as their model, the same for router and engines",
        metavar="NAME=PATH,…",
    ),
]
BlockTokens = Annotated[int, Setting("size of a Full Block, the same for router and engines", ge=1)]
VllmArgs = Annotated[
    tuple[str, ...],
    Setting("all following arguments are passed to vLLM's server", metavar="...", rest=True),
]


class FrontEndSettings(Settings, frozen=True):
    """Settings of the OpenAI endpoint; ``block_tokens`` is vLLM's ``--block-size``."""

    model: Model
    host: Host = "127.0.0.1"
    port: Port = 8000
    served_model_names: ServedNames = ()
    max_model_len: MaxModelLen = None
    dtype: Dtype = "auto"
    block_tokens: BlockTokens = 64
    lora_modules: LoraModules = msgspec.field(default_factory=dict)
    vllm_args: VllmArgs = ()
