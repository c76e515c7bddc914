"""`dualpath storage ls`, `du` and `verify`: nothing is changed, but for bad blocks if asked for."""

import argparse
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from dualpath.cli.output import add_json_argument, say, wrote_json
from dualpath.core.errors import ConfigError

if TYPE_CHECKING:
    from dualpath.policy.chain_index import ChainIndex
    from dualpath.storage.inventory import Grouping, Share
    from dualpath.storage.objects import ObjectTree

_EXIT_BAD = 1
_GIB = 1 << 30
_PROGRESS_S = 2.0


def add_actions(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parsers of the three."""
    parser = add_action(actions, "ls", "list the namespaces: model, blocks, size, last use")
    add_json_argument(parser)
    parser.set_defaults(act=look, by="namespace")
    parser = add_action(actions, "du", "say what takes the space")
    parser.add_argument(
        "--by",
        choices=("namespace", "tenant", "age"),
        default="namespace",
        help="tenant: the tag of a cache_salt; age: time since the last use (default: namespace)",
    )
    add_json_argument(parser)
    parser.set_defaults(act=look)
    parser = add_action(actions, "verify", "read and check every block; exit code 1 if one is bad")
    parser.add_argument(
        "--rate",
        default="100MB",
        metavar="BYTES/S",
        help="read no faster than that, such as 1GB; 0: as fast as it goes (default: 100MB)",
    )
    parser.add_argument(
        "--remove",
        action="store_true",
        help="remove the blocks that are bad, but not those of another format or storage key",
    )
    parser.add_argument(
        "--storage-key-file",
        default="",
        metavar="FILE",
        help="as engines have it, for sealed blocks (default: DUALPATH_STORAGE_KEY)",
    )
    parser.set_defaults(act=verify)


def add_action(
    actions: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, text: str
) -> argparse.ArgumentParser:
    """Return the parser of an action on a storage."""
    parser = actions.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
    )
    parser.add_argument(
        "storage",
        metavar="STORAGE",
        help="a path, file://PATH or s3://BUCKET/PREFIX",
    )
    parser.add_argument(
        "--survey",
        action="store_true",
        help="look at what lies there, and not at the janitor's index",
    )
    return parser


def opened(args: argparse.Namespace) -> "tuple[ObjectTree, ChainIndex]":
    """Return everything in a storage and what is known of it; raises ``ConfigError``."""
    from dualpath.storage.inventory import known

    tree = open_place(args.storage)
    return tree, known(tree, time.time, Progress("surveyed"), survey=args.survey)


def open_place(location: str) -> "ObjectTree":
    """Return everything in a storage; raises ``ConfigError`` where there is none."""
    from dualpath.storage.factory import open_tree

    tree = open_tree(location)
    if not tree.folders(""):
        raise ConfigError(f"nothing lies at {location!r}; give the engines' --storage")
    return tree


class Progress:
    """Says every few seconds on standard error how far something has come."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._said_s = time.monotonic()

    def __call__(self, share: float) -> None:
        """Note the share that is done, 0 to 1."""
        if time.monotonic() - self._said_s >= _PROGRESS_S:
            self._said_s = time.monotonic()
            say(f"{share * 100:.0f} % {self._what}")


def look(args: argparse.Namespace) -> int:
    """Print the groups; returns 0."""
    from dualpath.storage.inventory import shares
    from dualpath.storage.status import read_status

    tree, index = opened(args)
    by: Grouping = args.by
    found = shares(tree, index, by, time.time())
    if wrote_json(args, found):
        return 0
    for line in _table(found, by):
        print(line)
    status = read_status(tree)
    if status is not None:
        quota = status.limits.quota_bytes
        said = datetime.fromtimestamp(status.time_s, UTC).isoformat(" ", "seconds")
        print(f"quota: {_size(quota) if quota else 'none'}; janitor {status.holder}, heard {said}")
    return 0


def verify(args: argparse.Namespace) -> int:
    """Check all blocks and print the bad ones; returns 1 if there are any."""
    from dualpath.engine.storage_keys import load_storage_keys
    from dualpath.storage.block_file import STAYING
    from dualpath.storage.inventory import Choice, chosen, discard
    from dualpath.storage.inventory import verify as check

    keys = load_storage_keys(args.storage_key_file)
    tree, index = opened(args)
    rate = parse_amount("--rate", args.rate)
    rows, report = chosen(index, Choice()), Progress("checked")
    bad, missing, read_bytes = [], 0, 0
    verdicts = check(tree, index, rows, rate, keys, time.monotonic, time.sleep)
    for number, verdict in enumerate(verdicts):
        read_bytes += verdict.bytes
        missing += verdict.bytes == 0
        if verdict.reason is not None and verdict.bytes:
            bad.append(verdict)
            print(f"{verdict.namespace}/{verdict.key.hex()}: {verdict.reason}")
        report(number / len(rows))
    if args.remove:
        discard(tree, [one for one in bad if one.reason not in STAYING])
    done = " and removed" if args.remove else ""
    print(f"{len(rows) - missing} blocks, {_size(read_bytes)} read; {len(bad)} bad{done}")
    return _EXIT_BAD if bad else 0


def parse_amount(flag: str, text: str) -> float:
    """Return bytes or bytes/s; raises ``ConfigError`` that names the flag."""
    from dualpath.core.settings import Declared, Setting

    try:
        amount: float = Declared("amount_bytes", float, Setting(flag, ge=0), 0.0).parse(text)
    except ConfigError as error:
        raise ConfigError(f"{flag} is {text!r}; give an amount such as 500MB") from error
    return amount


def _table(found: "list[Share]", by: str) -> list[str]:
    heads = {"namespace": "namespace", "tenant": "tenant", "age": "used within"}
    rows = [(heads[by], "blocks", "size", "tenants", "last use", "protection", "model")]
    rows += [
        (
            share.name,
            f"{share.blocks:,}",
            _size(share.bytes),
            str(share.tenants),
            datetime.fromtimestamp(share.used_s, UTC).isoformat(" ", "minutes"),
            share.protection,
            share.model,
        )
        for share in found
    ]
    total = sum(share.bytes for share in found)
    rows.append(("all", f"{sum(s.blocks for s in found):,}", _size(total), "", "", "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(7)]
    return [
        "  ".join(
            cell.ljust(width) if column in (0, 4, 5, 6) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _size(amount: float) -> str:
    return f"{amount / _GIB:.2f} GiB" if amount >= _GIB else f"{amount / (1 << 20):.1f} MiB"
