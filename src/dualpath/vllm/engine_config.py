"""vLLM's arguments and configuration for the router's process: a front end without an engine.

The configuration is the one an engine would make of the same arguments, because rendering,
tokenising, validating and detokenising all read it.  Nothing is loaded and nothing reserved:
weights, KV memory and workers belong to the engines.
"""

import argparse
import socket
from typing import Any, NoReturn

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.launcher import setup_server
from vllm.utils.argparse_utils import FlexibleArgumentParser

from dualpath.core.errors import ConfigError
from dualpath.vllm.engine_arguments import lora_arguments
from dualpath.vllm.front_end_settings import FrontEndSettings
from dualpath.vllm.serve_parser import make_arg_parser, validate_parsed_serve_args

#: vLLM arguments that start something other than one HTTP front end, with their harmless values.
_FOREIGN_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "headless": (False,),
    "uds": (None,),
    "grpc": (False,),
    "grpc_port": (None,),
    "tokens_only": (False,),
    "api_server_count": (None, 1),
    "data_parallel_size": (1,),
}


#: Of one prompt, unless `--limit-mm-per-prompt` says otherwise: each is decoded in the router.
MOST_IMAGES = 16
#: Stands in messages to clients where no ``--allowed-media-domains`` are given.
NO_DOMAIN = "none; send images as data: URLs"


class _Parser(FlexibleArgumentParser):
    """vLLM's parser, except that a wrong argument is a ``ConfigError`` instead of an exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"front-end arguments: {message}; see `vllm serve --help=all`")


def parse_front_end_arguments(settings: FrontEndSettings) -> argparse.Namespace:
    """Return the namespace vLLM's server works with.

    Prompt token details are reported by default, since hit tokens are what this server is about.
    Raises ``ConfigError`` for arguments vLLM refuses or that make no sense without an engine.
    """
    arguments = ["--host", settings.host, "--port", str(settings.port)]
    arguments += ["--dtype", settings.dtype, "--block-size", str(settings.block_tokens)]
    if settings.max_model_len is not None:
        arguments += ["--max-model-len", str(settings.max_model_len)]
    if settings.served_model_names:
        arguments += ["--served-model-name", *settings.served_model_names]
    arguments += lora_arguments(settings.lora_modules)
    parser = make_arg_parser(_Parser(prog="dualpath router"))
    parser.set_defaults(enable_prompt_tokens_details=True)
    try:
        namespace = parser.parse_args([*arguments, *settings.vllm_args])
        if namespace.model_tag is not None:
            parser.error(f"unexpected {namespace.model_tag!r}; the model is {settings.model!r}")
        namespace.model = settings.model
        validate_parsed_serve_args(namespace)
    except (TypeError, ValueError, OSError) as error:
        raise ConfigError(f"front-end arguments: {_one_line(error)}") from error
    _bound_images(namespace)
    for name, harmless in _FOREIGN_ARGUMENTS.items():
        value = getattr(namespace, name, harmless[0])
        if value not in harmless:
            raise ConfigError(
                f"--{name.replace('_', '-')} {value} does not apply to the router, which has no "
                "engine of its own and serves one TCP port; leave it out, or give it to the engines"
            )
    return namespace


def _bound_images(namespace: argparse.Namespace) -> None:
    """Let the front end fetch nothing that it was not told to, and keep no images.

    Its cache goes by names that clients may choose: one would see what another sent.
    """
    if not namespace.limit_mm_per_prompt:
        namespace.limit_mm_per_prompt = {"image": MOST_IMAGES, "video": 0, "audio": 0}
    if not namespace.allowed_media_domains:
        namespace.allowed_media_domains = [NO_DOMAIN]
    namespace.mm_processor_cache_gb = 0
    namespace.enable_prefix_caching = False


def adapter_paths(namespace: argparse.Namespace) -> dict[str, str]:
    """Return the LoRA adapters that clients may name, and their paths."""
    return {module.name: module.path for module in namespace.lora_modules or ()}


def make_engine_config(namespace: argparse.Namespace) -> VllmConfig:
    """Return vLLM's configuration for ``namespace``; loads no weights and starts no worker.

    Raises ``ConfigError`` if the model's configuration or tokenizer cannot be used.
    """
    try:
        return AsyncEngineArgs.from_cli_args(namespace).create_engine_config()
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ConfigError(
            f"model {namespace.model!r} cannot be used: {_one_line(error)}; give a directory that "
            "holds config.json and the tokenizer, or a model name that can be downloaded"
        ) from error


def bind_listen_socket(namespace: argparse.Namespace, *, share_port: bool = False) -> socket.socket:
    """Return the bound socket, so that a taken port is noticed before any work.

    ``share_port``: others of this user that say so may have the same one.

    Raises ``ConfigError`` naming the port, or the unknown tool or reasoning parser.
    """
    try:
        _, listener = setup_server(namespace, reuse_port=share_port)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {namespace.host}:{namespace.port}: {error.strerror or error}; "
            "free it or choose another with --host and --port"
        ) from error
    except KeyError as error:
        raise ConfigError(_one_line(error.args[0])) from error
    # Connections inherit it. asyncio sets it only on sockets that name TCP as their protocol,
    # which vLLM's does not: each token would wait for the client to acknowledge the one before.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _one_line(error: object) -> str:
    """Return the gist of a possibly long message on one line of at most 300 characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:297]}..."
