"""`dualpath storage ls`, `du` and `verify`: read-only, except `verify --remove`."""

import argparse
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from dualpath.cli.output import add_json_argument, print_progress, wrote_json
from dualpath.core.errors import ConfigError

if TYPE_CHECKING:
    from dualpath.policy.chain_index import ChainIndex
    from dualpath.storage.inventory import Grouping, GroupUsage
    from dualpath.storage.objects import ObjectTree

_EXIT_BAD = 1
_GIB = 1 << 30
_PROGRESS_S = 2.0


def add_actions(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the three parsers."""
    parser = add_action(actions, "ls", "list the namespaces: model, blocks, size, last use")
    add_json_argument(parser)
    parser.set_defaults(act=look, by="namespace")
    parser = add_action(actions, "du", "print used space by namespace, tenant or age")
    parser.add_argument(
        "--by",
        choices=("namespace", "tenant", "age"),
        default="namespace",
        help="tenant: the tag of a cache_salt; age: time since the last use (default: namespace)",
    )
    add_json_argument(parser)
    parser.set_defaults(act=look)
    parser = add_action(
        actions, "verify", "read and verify every block; exit code 1 if one is corrupt"
    )
    parser.add_argument(
        "--rate",
        default="100MB",
        metavar="BYTES/S",
        help="limit of the read rate, such as 1GB; 0: none (default: 100MB)",
    )
    parser.add_argument(
        "--remove",
        action="store_true",
        help="remove corrupt blocks, but not those of another format or storage key",
    )
    parser.add_argument(
        "--storage-key-file",
        default="",
        metavar="FILE",
        help="the engines' storage keys, for sealed blocks (default: DUALPATH_STORAGE_KEY)",
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
        help="list the storage instead of using the janitor's index",
    )
    return parser


def open_index(args: argparse.Namespace) -> "tuple[ObjectTree, ChainIndex]":
    """Return a storage as a tree, and an index of its blocks; raises ``ConfigError``."""
    from dualpath.storage.inventory import load_or_survey

    tree = open_existing_tree(args.storage)
    return tree, load_or_survey(tree, time.time, Progress("surveyed"), survey=args.survey)


def open_existing_tree(location: str) -> "ObjectTree":
    """Return a storage as a tree; raises ``ConfigError`` if it is empty."""
    from dualpath.storage.factory import open_tree

    tree = open_tree(location)
    if not tree.folders(""):
        raise ConfigError(f"there is no storage at {location!r}; give the engines' --storage")
    return tree


class Progress:
    """Prints progress to standard error every few seconds."""

    def __init__(self, action: str) -> None:
        self._action = action
        self._printed_s = time.monotonic()

    def __call__(self, share: float) -> None:
        """Report the completed share, 0 to 1."""
        if time.monotonic() - self._printed_s >= _PROGRESS_S:
            self._printed_s = time.monotonic()
            print_progress(f"{share * 100:.0f} % {self._action}")


def look(args: argparse.Namespace) -> int:
    """Print the groups; returns 0."""
    from dualpath.storage.inventory import usage_by_group
    from dualpath.storage.status import read_status

    tree, index = open_index(args)
    by: Grouping = args.by
    found = usage_by_group(tree, index, by, time.time())
    if wrote_json(args, found):
        return 0
    for line in _table(found, by):
        print(line)
    status = read_status(tree)
    if status is not None:
        quota = status.limits.quota_bytes
        reported = datetime.fromtimestamp(status.time_s, UTC).isoformat(" ", "seconds")
        print(
            f"quota: {_size(quota) if quota else 'none'}; "
            f"janitor {status.holder}, last report {reported}"
        )
    return 0


def verify(args: argparse.Namespace) -> int:
    """Verify all blocks and print corrupt ones; returns 1 if there are any."""
    from dualpath.engine.storage_keys import load_storage_keys
    from dualpath.storage.block_file import UNREADABLE_HERE
    from dualpath.storage.inventory import BlockFilter, discard, select_rows
    from dualpath.storage.inventory import verify as check

    keys = load_storage_keys(args.storage_key_file)
    tree, index = open_index(args)
    rate = parse_amount("--rate", args.rate)
    rows, report = select_rows(index, BlockFilter()), Progress("checked")
    bad, missing, read_bytes = [], 0, 0
    results = check(tree, index, rows, rate, keys, time.monotonic, time.sleep)
    for number, result in enumerate(results):
        read_bytes += result.bytes
        missing += result.bytes == 0
        if result.reason is not None and result.bytes:
            bad.append(result)
            print(f"{result.namespace}/{result.key.hex()}: {result.reason}")
        report(number / len(rows))
    if args.remove:
        discard(tree, [one for one in bad if one.reason not in UNREADABLE_HERE])
    done = " and removed" if args.remove else ""
    print(f"{len(rows) - missing} blocks, {_size(read_bytes)} read; {len(bad)} corrupt{done}")
    return _EXIT_BAD if bad else 0


def parse_amount(flag: str, text: str) -> float:
    """Return bytes or bytes/s; raises ``ConfigError`` that names the flag."""
    from dualpath.core.settings import Declared, Setting

    try:
        amount: float = Declared("amount_bytes", float, Setting(flag, ge=0), 0.0).parse(text)
    except ConfigError as error:
        raise ConfigError(f"{flag} is {text!r}; give an amount such as 500MB") from error
    return amount


def _table(found: "list[GroupUsage]", by: str) -> list[str]:
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
