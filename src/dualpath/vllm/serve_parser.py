"""vLLM's parser of what ``vllm serve`` takes, wherever this version of vLLM has it."""

try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
except ImportError:  # vLLM 0.33 keeps it beside what all its servers share.
    from vllm.entrypoints.common.cli_args import (
        make_arg_parser,
        validate_parsed_serve_args,
    )

__all__ = ["make_arg_parser", "validate_parsed_serve_args"]
