"""`dualpath storage janitor` and `gc`: keep a storage within limits, for ever or once."""

import argparse
import logging
import signal
import threading
import time
import uuid
from typing import TYPE_CHECKING

from dualpath.cli.settings import add_settings, flag_settings
from dualpath.cli.storage_look import Progress, add_action, open_place
from dualpath.core.errors import ConfigError, StorageError
from dualpath.engine.storage_settings import StorageLimitSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from dualpath.storage.janitor import Janitor
    from dualpath.storage.objects import ObjectTree

log = logging.getLogger(__name__)

#: Between two steps while there is something to remove.
_BUSY_S = 0.05


def add_actions(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add both parsers."""
    for name, text, act in (
        ("janitor", "keep a storage within limits until it is ended", janitor),
        ("gc", "survey a storage and remove what is beyond its limits, once", gc),
    ):
        parser = add_action(actions, name, text)
        add_settings(parser, StorageLimitSettings)
        parser.set_defaults(act=act)


def janitor(args: argparse.Namespace) -> int:
    """Be a candidate until SIGTERM or Ctrl-C; returns 0.

    Nothing need lie there yet: engines look for a janitor when they start.
    """
    from dualpath.storage.factory import open_tree
    from dualpath.storage.keeper import BEAT_S

    candidate, ends = _candidate(args, open_tree), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ends.set())
    was = False
    while not ends.is_set():
        try:
            holds = candidate.step()
        except StorageError as error:
            log.warning("%s", error)
            holds = was
        if holds != was:
            log.info("this is the janitor" if holds else "another is the janitor")
        was = holds
        ends.wait(_BUSY_S if candidate.is_busy else BEAT_S)
    candidate.close()
    _say_what_was_done(candidate)
    return 0


def gc(args: argparse.Namespace) -> int:
    """Survey and remove; returns 0.

    Raises:
        ConfigError: no limit, or an engine is the janitor already.
    """
    candidate = _candidate(args, open_place)
    if not candidate.step():
        raise ConfigError(
            "an engine or another process is the janitor of this storage and does this; see its "
            "log, or wait 30 s if it has just ended"
        )
    survey = candidate.survey
    assert survey is not None
    survey.whole(Progress("surveyed"))
    while candidate.step() and candidate.is_busy:
        pass
    candidate.close()
    _say_what_was_done(candidate)
    return 0


def _candidate(args: argparse.Namespace, open_storage: "Callable[[str], ObjectTree]") -> "Janitor":
    from dualpath.storage.janitor import Janitor

    limits = flag_settings(args, StorageLimitSettings).limits
    if not limits.any:
        raise ConfigError(
            "there is no limit; give --storage-quota, --storage-namespace-quota, "
            "--storage-tenant-quota or --storage-ttl"
        )
    tree = open_storage(args.storage)
    return Janitor(tree, f"alone-{uuid.uuid4().hex[:12]}", limits, time.time, time.monotonic)


def _say_what_was_done(candidate: "Janitor") -> None:
    totals = candidate.totals
    print(f"{totals.evicted_blocks:,} blocks, {totals.evicted_bytes / 1e9:.2f} GB removed")
