"""What writers have left half-written: files under temporary names, where a storage has such.

An engine that starts removes what dead processes of its own machine have left.  A machine that does
not come back, and a janitor that ends while it saves, leave theirs for good: the janitor finds them
by their age, as nobody can ask a process of another machine.
"""

from dualpath.storage.directory import TEMPORARY_FOLDER
from dualpath.storage.objects import ObjectTree
from dualpath.storage.survey import is_namespace

#: Far longer than any write takes: half-written since then, nobody writes it any more.
STALE_S = 24 * 3600.0
#: The janitor's own folder, which has temporary names as namespaces have.
_JANITOR = "janitor"


def remove_half_written(tree: ObjectTree, now_s: float) -> int:
    """Remove what was begun more than ``STALE_S`` before ``now_s`` (Unix time); return how many.

    Raises ``StorageError``.
    """
    return tree.remove(
        [
            info.name
            for folder in tree.folders("")
            if folder == _JANITOR or is_namespace(folder)
            for info in tree.objects(f"{folder}/{TEMPORARY_FOLDER}/")
            if info.written_s < now_s - STALE_S
        ]
    )
