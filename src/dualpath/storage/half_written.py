"""Removes temporary files that dead writers have left, from storages that are directories.

An engine removes the temporary files of dead processes of its own machine when it starts.  Those of
a machine that does not come back, and of a janitor that died while it saved, are removed by the
janitor after ``STALE_S``: liveness of a process can be checked on its own machine only.
"""

from dualpath.storage.directory import TEMPORARY_FOLDER
from dualpath.storage.objects import ObjectTree
from dualpath.storage.survey import is_namespace

#: Far longer than any write takes: the writer of an older temporary file is dead.
STALE_S = 24 * 3600.0
#: The janitor's own folder, which has temporary names as namespaces have.
_JANITOR = "janitor"


def remove_stale_temporaries(tree: ObjectTree, now_s: float) -> int:
    """Remove temporary files older than ``STALE_S`` at ``now_s`` (Unix time); return how many.

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
