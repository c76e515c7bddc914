"""`dualpath storage janitor` and `gc`: keep a storage within limits, continuously or once."""

import argparse
import logging
import signal
import threading
import time
import uuid
from typing import TYPE_CHECKING

from dualpath.cli.settings import add_settings, flag_settings
from dualpath.cli.storage_look import Progress, add_action, open_existing_tree
from dualpath.core.errors import ConfigError, StorageError
from dualpath.engine.storage_settings import StorageLimitSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from dualpath.storage.janitor import Janitor
    from dualpath.storage.objects import ObjectTree

log = logging.getLogger(__name__)

#: Pause between steps while there are blocks to remove.
_BUSY_S = 0.05


def add_actions(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add both parsers."""
    for name, text, act in (
        ("janitor", "keep a storage within limits until it is stopped", janitor),
        ("gc", "survey a storage and evict blocks beyond its limits, once", gc),
    ):
        parser = add_action(actions, name, text)
        add_settings(parser, StorageLimitSettings)
        parser.set_defaults(act=act)


def janitor(args: argparse.Namespace) -> int:
    """Run a janitor candidate until SIGTERM or Ctrl-C; returns 0.

    The storage may be empty, so that a janitor can be started before the engines.
    """
    from dualpath.storage.factory import open_tree
    from dualpath.storage.keeper import BEAT_S

    candidate, stop = _candidate(args, open_tree), threading.Event()
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


def gc(args: argparse.Namespace) -> int:
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
