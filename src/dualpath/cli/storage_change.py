"""`dualpath storage pin` and `rm`."""

import argparse
import re
import time
import uuid
from typing import TYPE_CHECKING

from dualpath.cli.storage_look import Progress, add_action, open_existing_tree, open_index
from dualpath.core.blocks import tenant_tag
from dualpath.core.errors import ConfigError

if TYPE_CHECKING:
    from dualpath.storage.inventory import BlockFilter

_AGE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(s|m|h|d)?")
_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def add_actions(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
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
    from dualpath.storage.pins import PINS, pin_name

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
    else:
        for name in names:
            tree.replace(name, b"")
    for info in tree.objects(PINS):
        print(info.name.removeprefix(PINS))
    return 0


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
        found = _AGE.fullmatch(args.unused_for)
        if found is None:
            raise ConfigError(f"--unused-for is {args.unused_for!r}; give a time such as 12h or 7d")
        since_s = time.time() - float(found[1]) * _UNITS_S[found[2] or ""]
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
