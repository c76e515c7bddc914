"""What the router's HTTP front end is told; importing it does not import vLLM."""

from typing import Annotated

import msgspec

from dualpath.core.errors import ConfigError


class FrontEndSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the OpenAI endpoint.

    ``model`` is a directory or model name whose configuration and tokenizer are read;
    ``max_model_len`` tokens (None: the model's own); ``block_tokens`` tokens per Full Block and
    therefore vLLM's ``--block-size``; ``port`` 0 takes any free one; ``vllm_arguments`` are
    further arguments of vLLM's own server, verbatim.
    """

    model: str
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    served_model_names: tuple[str, ...] = ()
    max_model_len: Annotated[int, msgspec.Meta(ge=2)] | None = None
    dtype: str = "auto"
    block_tokens: Annotated[int, msgspec.Meta(ge=1)] = 64
    vllm_arguments: tuple[str, ...] = ()

    def checked(self) -> "FrontEndSettings":
        """Return these settings; raise ``ConfigError`` for one out of its range."""
        try:
            return msgspec.convert(msgspec.to_builtins(self), FrontEndSettings)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"endpoint setting: {error}; choose a value inside the stated range"
            ) from error
