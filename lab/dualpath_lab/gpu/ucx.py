"""UCX's choice of transports, from the tables that it logs with ``UCX_PROTO_INFO=y``.

UCX logs a table for each operation when it is first used:

    | here self cfg#0                                          |
    | remote memory write by ucp_put* from host memory to host |
    | 0..inf | zero-copy   | cma/memory                        |
"""

import re
from collections.abc import Iterable

#: Makes UCX log its choices.
PROTOCOL_INFO = {"UCX_PROTO_INFO": "y"}
_CELLS = re.compile(r"\|(.*)\|\s*$")
_OPERATION = re.compile(r"(remote memory \w+) by \S+ ?(.*)")
_RANGE = re.compile(r"\d+(\.\.(\d+|inf))?$")


def choices(lines: Iterable[str]) -> list[dict[str, str]]:
    """Return how each operation on remote memory is made, by range of its bytes, without repeats.

    An operation on a GPU's memory that no NIC or CUDA IPC carries is one of ``software emulation``.
    """
    operation, rows = "", []
    for line in lines:
        if not (found := _CELLS.search(line)):
            continue
        cells = [cell.strip() for cell in found[1].split("|")]
        if len(cells) == 1:
            named = _OPERATION.match(cells[0])
            operation = f"{named[1].removeprefix('remote memory ')} {named[2]}" if named else ""
        elif operation and len(cells) == 3 and _RANGE.match(cells[0]):
            row = {"operation": operation, "bytes": cells[0], "how": cells[1], "UCX": cells[2]}
            if row not in rows:
                rows.append(row)
    return rows
