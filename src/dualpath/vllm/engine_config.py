"""vLLM's arguments and configuration for the router's process: a front end without an engine.

The configuration is the one that an engine would create from the same arguments, because rendering,
tokenising, validation and detokenising all read it.  No weights are loaded, no KV memory is
reserved and no worker is started: these belong to the engines.
"""

import argparse
import socket
from typing import Any, NoReturn

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.launcher import setup_server
from vllm.utils.argparse_utils import FlexibleArgumentParser

from dualpath.core.addresses import HostPort, plain_host
from dualpath.core.errors import ConfigError
from dualpath.node.sockets import resolved
from dualpath.vllm.engine_arguments import lora_arguments
from dualpath.vllm.front_end_settings import FrontEndSettings

# ------------------------------------------------------------------------------------ serve parser
# vLLM's argument parser of ``vllm serve``; its module depends on vLLM's version.

try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
except ImportError:  # vLLM 0.33
    from vllm.entrypoints.common.cli_args import (
        make_arg_parser,
        validate_parsed_serve_args,
    )

__all__ = ["make_arg_parser", "validate_parsed_serve_args"]


#: vLLM arguments that do not apply to one HTTP front end, with the values that are accepted.
_FOREIGN_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "headless": (False,),
    "uds": (None,),
    "grpc": (False,),
    "grpc_port": (None,),
    "tokens_only": (False,),
    "api_server_count": (None, 1),
    "data_parallel_size": (1,),
}


#: Images of one prompt without `--limit-mm-per-prompt`; the router decodes each of them.
MAX_IMAGES = 16
#: Appears in messages to clients if no ``--allowed-media-domains`` are given.
NO_MEDIA_DOMAIN = "none; send images as data: URLs"


class _Parser(FlexibleArgumentParser):
    """vLLM's parser, which raises ``ConfigError`` for a wrong argument instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"front-end arguments: {message}; see `vllm serve --help=all`")


def parse_front_end_arguments(settings: FrontEndSettings) -> argparse.Namespace:
    """Return the parsed arguments for vLLM's server.

    Prompt token details are reported by default, because they include ``cached_tokens``.
    Raises ``ConfigError`` for arguments that vLLM refuses or that need an engine.
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
        namespace.host = plain_host(
            namespace.host or settings.host
        )  # --vllm-args may have its own.
        validate_parsed_serve_args(namespace)
    except (TypeError, ValueError, OSError) as error:
        raise ConfigError(f"front-end arguments: {_one_line(error)}") from error
    _restrict_images(namespace)
    for name, accepted in _FOREIGN_ARGUMENTS.items():
        value = getattr(namespace, name, accepted[0])
        if value not in accepted:
            raise ConfigError(
                f"--{name.replace('_', '-')} {value} does not apply to the router, which has no "
                "engine of its own and serves one TCP port; leave it out, or give it to the engines"
            )
    return namespace


def _restrict_images(namespace: argparse.Namespace) -> None:
    """Restrict where the front end fetches images from, and disable its image cache.

    The cache is keyed by names that clients choose, so one client could read another's image.
    """
    if not namespace.limit_mm_per_prompt:
        namespace.limit_mm_per_prompt = {"image": MAX_IMAGES, "video": 0, "audio": 0}
    if not namespace.allowed_media_domains:
        namespace.allowed_media_domains = [NO_MEDIA_DOMAIN]
    namespace.mm_processor_cache_gb = 0
    namespace.enable_prefix_caching = False


def adapter_paths(namespace: argparse.Namespace) -> dict[str, str]:
    """Return the LoRA adapters that clients may request, with their paths."""
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
    """Return the bound socket, so that a port in use is reported before any other work.

    With ``share_port``, other processes of the same user that set it may bind the same port.

    Raises ``ConfigError`` naming the port, or the unknown tool or reasoning parser.
    """
    try:
        # vLLM binds names as IPv4 only.
        _, at = resolved(namespace.host, listens=True)
        here = argparse.Namespace(**{**vars(namespace), "host": at})
        _, listener = setup_server(here, reuse_port=share_port)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {HostPort(namespace.host, namespace.port)}: "
            f"{error.strerror or error}; free it or choose another with --host and --port"
        ) from error
    except KeyError as error:
        raise ConfigError(_one_line(error.args[0])) from error
    # Connections inherit TCP_NODELAY. asyncio sets it only on sockets created with the protocol
    # TCP, which vLLM's is not: each token would wait for the ack of the one before.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _one_line(error: object) -> str:
    """Return a possibly long message on one line, cut to 300 characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:297]}..."
