"""`dualpath storage`: lists, verifies, pins and removes stored blocks, and applies limits.

Actions are in modules `dualpath.cli.storage_<name>` with `add_actions(actions)`, as in
`dualpath_lab.cli.chaos`.
"""

import argparse
import functools
import logging
import signal
import threading
import time
import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from dualpath.cli.output import add_json_argument, print_progress, wrote_json
from dualpath.cli.settings import add_settings, flag_settings
from dualpath.core.blocks import tenant_tag
from dualpath.core.errors import ConfigError, StorageError
from dualpath.core.names import in_one_line
from dualpath.core.settings import nearest
from dualpath.engine.settings import StorageLimitSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from dualpath.storage.chain_index import ChainIndex
    from dualpath.storage.inventory import BlockFilter, Grouping, GroupUsage
    from dualpath.storage.janitor import Janitor
    from dualpath.storage.objects import ObjectTree

# ------------------------------------------------------------------------------------ storage look
# `dualpath storage du` (also `ls`) and `verify`: read-only, except `verify --remove`.

_EXIT_BAD = 1
_GIB = 1 << 30
_PROGRESS_S = 2.0


def add_look_actions(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add both parsers."""
    parser = add_action(
        actions, "du", "print blocks, size and last use by namespace, tenant or age", alias="ls"
    )
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
    actions: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    text: str,
    alias: str | None = None,
) -> argparse.ArgumentParser:
    """Return the parser of an action on a storage."""
    parser = actions.add_parser(
        name,
        aliases=[alias] if alias else [],
        help=text,
        description=f"{text[0].upper()}{text[1:]}." + (f" Also: {alias}." if alias else ""),
        allow_abbrev=False,
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


def open_existing_tree(location: str, *, may_be_empty: bool = False) -> "ObjectTree":
    """Return a storage as a tree, and create nothing.

    Raises ``ConfigError`` if its directory does not exist or, unless it ``may_be_empty``, has no
    namespace.
    """
    from dualpath.storage.factory import directory_of, open_tree

    tree, directory = open_tree(location), directory_of(location)
    exists = directory is None or directory.is_dir()
    if not exists or not (may_be_empty or tree.folders("")):
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
    from dualpath.storage.janitor import read_status

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
            f"janitor {in_one_line(status.holder, 80)}, last report {reported}"
        )
    return 0


def verify(args: argparse.Namespace) -> int:
    """Verify all blocks and print corrupt ones; returns 1 if there are any."""
    from dualpath.engine.io.storage_maintenance import load_storage_keys
    from dualpath.storage.block_file import MISSING, UNREADABLE_HERE
    from dualpath.storage.inventory import BlockFilter, discard, select_rows
    from dualpath.storage.inventory import verify as check

    keys = load_storage_keys(args.storage_key_file)
    tree, index = open_index(args)
    rate = parse_number("--rate", "rate_bytes_per_s", args.rate)
    rows, report = select_rows(index, BlockFilter()), Progress("checked")
    bad, missing, read_bytes = [], 0, 0
    results = check(tree, index, rows, rate, keys, time.monotonic, time.sleep)
    for number, result in enumerate(results):
        read_bytes += result.bytes
        missing += result.reason == MISSING
        if result.reason not in (None, MISSING):
            bad.append(result)
            print(f"{result.namespace}/{result.key.hex()}: {result.reason}")
        report(number / len(rows))
    if args.remove:
        discard(tree, [one for one in bad if one.reason not in UNREADABLE_HERE])
    done = " and removed" if args.remove else ""
    print(f"{len(rows) - missing} blocks, {_size(read_bytes)} read; {len(bad)} corrupt{done}")
    return _EXIT_BAD if bad else 0


def parse_number(flag: str, name: str, text: str) -> float:
    """Return a number of at least 0 as of a setting called ``name``, whose end is the unit.

    Raises ``ConfigError`` that names the flag.
    """
    from dualpath.core.settings import Declared, Setting

    try:
        number: float = Declared(name, float, Setting(flag, ge=0), 0.0).parse(text)
    except ConfigError as error:
        raise ConfigError(error.spelled({name: flag})) from error
    return number


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
            in_one_line(share.model),
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


# ---------------------------------------------------------------------------------- storage change
# `dualpath storage pin` and `rm`.


def add_change_actions(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add both parsers."""
    pin_parser = add_action(actions, "pin", "exempt blocks from eviction, or list the pins")
    _add_filter_arguments(pin_parser)
    pin_parser.add_argument(
        "--chain", metavar="KEY", help="with --namespace: the prefix that ends with this block"
    )
    pin_parser.add_argument("--undo", action="store_true", help="remove the pin")
    pin_parser.set_defaults(act=pin)
    rm_parser = add_action(actions, "rm", "remove blocks, tails of prefixes before their heads")
    _add_filter_arguments(rm_parser)
    rm_parser.add_argument(
        "--unused-for", metavar="TIME", help="blocks unused for this long: 90m, 12h, 7d"
    )
    rm_parser.add_argument("--yes", action="store_true", help="remove instead of only counting")
    rm_parser.set_defaults(act=rm)


def _add_filter_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--namespace", metavar="NAME", help="a namespace listed by `ls`")
    parser.add_argument("--tenant", metavar="TAG", help="a tag listed by `du --by tenant`")
    parser.add_argument("--cache-salt", metavar="SALT", help="the tenant of this cache_salt")


def pin(args: argparse.Namespace) -> int:
    """Add or remove a pin, then print all pins; returns 0."""
    from dualpath.storage.janitor import PINS, pin_name

    tree, tenant = open_existing_tree(args.storage), _tenant(args)
    if args.chain and not args.namespace:
        raise ConfigError("--chain needs --namespace; the same key may be in several namespaces")
    if args.chain:
        names = [pin_name("chain", args.namespace, args.chain)]
    else:
        names = [pin_name("namespace", args.namespace)] if args.namespace else []
        names += [pin_name("tenant", tenant)] if tenant is not None else []
    if args.undo:
        tree.remove(names)
    elif names:
        _require_blocks(args, tree, tenant)
        for name in names:
            tree.replace(name, b"")
    for info in tree.objects(PINS):
        print(info.name.removeprefix(PINS))
    return 0


def _require_blocks(args: argparse.Namespace, tree: "ObjectTree", tenant: str | None) -> None:
    """Raise ``ConfigError`` if the storage has none of what is to be pinned."""
    from dualpath.storage.inventory import BlockFilter, load_or_survey, select_rows
    from dualpath.storage.posix import object_name

    namespaces = [name for name in tree.folders("") if tree.get(f"{name}/namespace.json", 1)]
    if args.namespace and args.namespace not in namespaces:
        raise ConfigError(
            f"--namespace is {args.namespace!r}, which this storage does not have; "
            f"{nearest(args.namespace, namespaces)}"
        )
    if args.chain:
        if tree.get(object_name(args.namespace, bytes.fromhex(args.chain)), 1) is None:
            raise ConfigError(
                f"--chain is {args.chain!r}, and namespace {args.namespace!r} has no such block; "
                "give the key of a stored block"
            )
    elif tenant is not None:
        index = load_or_survey(tree, time.time, Progress("surveyed"), survey=args.survey)
        select_rows(index, BlockFilter(tenant=tenant))


def rm(args: argparse.Namespace) -> int:
    """Remove the selected blocks, or count them without --yes; returns 0."""
    from dualpath.storage.inventory import remove, select_rows

    block_filter = _block_filter(args)
    tree, index = open_index(args)
    rows = select_rows(index, block_filter)
    size_bytes = int(index.tables().sizes[rows].sum())
    if not args.yes:
        print(f"{len(rows):,} blocks, {size_bytes / 1e9:.2f} GB; give --yes to remove them")
        return 0
    removed = remove(tree, index, rows, f"rm-{uuid.uuid4().hex[:12]}", Progress("removed"))
    print(f"{len(rows):,} blocks, {removed / 1e9:.2f} GB removed")
    return 0


def _block_filter(args: argparse.Namespace) -> "BlockFilter":
    from dualpath.storage.inventory import BlockFilter

    since_s = None
    if args.unused_for is not None:
        since_s = time.time() - parse_number("--unused-for", "unused_for_s", args.unused_for)
    block_filter = BlockFilter(args.namespace, _tenant(args), since_s)
    if block_filter == BlockFilter():
        raise ConfigError(
            "no blocks are selected; give --namespace, --tenant, --cache-salt or --unused-for"
        )
    return block_filter


def _tenant(args: argparse.Namespace) -> str | None:
    if args.cache_salt is not None:
        return tenant_tag(args.cache_salt)
    tag: str | None = args.tenant
    return tag


# --------------------------------------------------------------------------------- storage janitor
# `dualpath storage janitor`: keep a storage within limits, continuously or once.

log = logging.getLogger(__name__)

#: Pause between steps while there are blocks to remove.
_BUSY_S = 0.05


def add_janitor_actions(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser."""
    parser = add_action(actions, "janitor", "keep a storage within limits until it is stopped")
    parser.add_argument(
        "--once",
        action="store_true",
        help="survey the storage, evict blocks beyond its limits, and end",
    )
    add_settings(parser, StorageLimitSettings)
    parser.set_defaults(act=janitor)


def janitor(args: argparse.Namespace) -> int:
    """Run a janitor candidate until SIGTERM or Ctrl-C, or once; returns 0.

    Except with --once, the storage's directory may be empty, so that a janitor can be started
    before the engines.
    """
    if args.once:
        return _evict_once(args)
    from dualpath.storage.maintenance import BEAT_S

    open_storage = functools.partial(open_existing_tree, may_be_empty=True)
    candidate, stop = _candidate(args, open_storage), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    was_janitor = False
    while not stop.is_set():
        try:
            is_janitor = candidate.step()
        except StorageError as error:
            log.warning("%s", error)
            is_janitor = was_janitor
        if is_janitor != was_janitor:
            log.info(
                "this process is the janitor" if is_janitor else "another process is the janitor"
            )
        was_janitor = is_janitor
        stop.wait(_BUSY_S if candidate.is_busy else BEAT_S)
    candidate.close()
    _print_totals(candidate)
    return 0


def _evict_once(args: argparse.Namespace) -> int:
    """Survey the storage and evict blocks beyond its limits; returns 0.

    Raises:
        ConfigError: no limit is given, or another process is the janitor.
    """
    candidate = _candidate(args, open_existing_tree)
    if not candidate.step():
        raise ConfigError(
            "an engine or another process is the janitor of this storage and applies its limits; "
            "see its log, or wait 30 s if it has just stopped"
        )
    survey = candidate.survey
    assert survey is not None
    survey.run_to_end(Progress("surveyed"))
    while candidate.step() and candidate.is_busy:
        pass
    candidate.close()
    _print_totals(candidate)
    return 0


def _candidate(args: argparse.Namespace, open_storage: "Callable[[str], ObjectTree]") -> "Janitor":
    from dualpath.storage.janitor import Janitor

    limits = flag_settings(args, StorageLimitSettings).limits
    if not limits.any:
        raise ConfigError(
            "no limit is given; give --storage-quota, --storage-namespace-quota, "
            "--storage-tenant-quota or --storage-ttl"
        )
    tree = open_storage(args.storage)
    return Janitor(tree, f"alone-{uuid.uuid4().hex[:12]}", limits, time.time, time.monotonic)


def _print_totals(candidate: "Janitor") -> None:
    totals = candidate.totals
    print(f"{totals.evicted_blocks:,} blocks, {totals.evicted_bytes / 1e9:.2f} GB removed")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parsers of `dualpath storage`."""
    parser = subparsers.add_parser(
        "storage",
        help="list, verify, pin or remove stored blocks; keep a storage within limits",
        description="Maintain a storage: list, verify, pin or remove stored blocks, and keep the "
        "storage within limits. Engines may run at the same time.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    add_look_actions(actions)
    add_change_actions(actions)
    add_janitor_actions(actions)


def run(args: argparse.Namespace) -> int:
    """Run the action; return its exit code."""
    exit_code: int = args.act(args)
    return exit_code
