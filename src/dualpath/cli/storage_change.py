"""`dualpath storage pin` and `rm`."""

import argparse
import re
import time
import uuid
from typing import TYPE_CHECKING

from dualpath.cli.storage_look import Progress, add_action, open_place, opened
from dualpath.core.blocks import tenant_tag
from dualpath.core.errors import ConfigError

if TYPE_CHECKING:
    from dualpath.storage.inventory import Choice

_AGE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(s|m|h|d)?")
_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def add_actions(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add both parsers."""
    pin_parser = add_action(actions, "pin", "keep something whatever the quota, or list what is")
    _add_choice(pin_parser)
    pin_parser.add_argument(
        "--chain", metavar="KEY", help="with --namespace: the prefix that ends with this block"
    )
    pin_parser.add_argument("--undo", action="store_true", help="take the pin away")
    pin_parser.set_defaults(act=pin)
    rm_parser = add_action(actions, "rm", "remove blocks, ends of prefixes before their beginnings")
    _add_choice(rm_parser)
    rm_parser.add_argument(
        "--unused-for", metavar="TIME", help="what nobody asked for that long: 90m, 12h, 7d"
    )
    rm_parser.add_argument("--yes", action="store_true", help="remove; else it is only counted")
    rm_parser.set_defaults(act=rm)


def _add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--namespace", metavar="NAME", help="a folder that `ls` names")
    parser.add_argument("--tenant", metavar="TAG", help="a tag that `du --by tenant` names")
    parser.add_argument("--cache-salt", metavar="SALT", help="the tenant of this cache_salt")


def pin(args: argparse.Namespace) -> int:
    """Pin, take a pin away, or print all; returns 0."""
    from dualpath.storage.pins import PINS, pin_name

    tree, tenant = open_place(args.storage), _tenant(args)
    if args.chain and not args.namespace:
        raise ConfigError("--chain needs --namespace; the same key may lie in several")
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
    """Remove what is chosen, or count it; returns 0."""
    from dualpath.storage.inventory import chosen, remove

    choice = _choice(args)
    tree, index = opened(args)
    rows = chosen(index, choice)
    size_bytes = int(index.tables().sizes[rows].sum())
    if not args.yes:
        print(f"{len(rows):,} blocks, {size_bytes / 1e9:.2f} GB; --yes removes them")
        return 0
    removed = remove(tree, index, rows, f"rm-{uuid.uuid4().hex[:12]}", Progress("removed"))
    print(f"{len(rows):,} blocks, {removed / 1e9:.2f} GB removed")
    return 0


def _choice(args: argparse.Namespace) -> "Choice":
    from dualpath.storage.inventory import Choice

    since_s = None
    if args.unused_for is not None:
        found = _AGE.fullmatch(args.unused_for)
        if found is None:
            raise ConfigError(f"--unused-for is {args.unused_for!r}; give a time such as 12h or 7d")
        since_s = time.time() - float(found[1]) * _UNITS_S[found[2] or ""]
    choice = Choice(args.namespace, _tenant(args), since_s)
    if choice == Choice():
        raise ConfigError(
            "nothing is chosen; give --namespace, --tenant, --cache-salt or --unused-for"
        )
    return choice


def _tenant(args: argparse.Namespace) -> str | None:
    if args.cache_salt is not None:
        return tenant_tag(args.cache_salt)
    tag: str | None = args.tenant
    return tag
