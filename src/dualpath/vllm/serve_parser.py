"""vLLM's argument parser of ``vllm serve``, whose module depends on vLLM's version."""

try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
except ImportError:  # vLLM 0.33
    from vllm.entrypoints.common.cli_args import (
        make_arg_parser,
        validate_parsed_serve_args,
    )

__all__ = ["make_arg_parser", "validate_parsed_serve_args"]
