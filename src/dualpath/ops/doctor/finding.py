"""What a check says: how it stands, what was found, what is needed, what to do."""

import enum
from collections.abc import Iterable

import msgspec


class Status(enum.StrEnum):
    """Errors keep an engine from serving; warnings cost speed or apply to some nodes only."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


class Finding(msgspec.Struct, frozen=True):
    """One check's answer; ``limit`` is what is needed and ``remedy`` what to do, empty if none."""

    check: str
    status: Status
    found: str
    limit: str = ""
    remedy: str = ""


def ok(check: str, found: str, limit: str = "") -> Finding:
    """Nothing to do."""
    return Finding(check, Status.OK, found, limit)


def warning(check: str, found: str, limit: str, remedy: str) -> Finding:
    """Works, but not as well as it could."""
    return Finding(check, Status.WARNING, found, limit, remedy)


def error(check: str, found: str, limit: str, remedy: str) -> Finding:
    """An engine on this node would not serve."""
    return Finding(check, Status.ERROR, found, limit, remedy)


def has_errors(findings: Iterable[Finding]) -> bool:
    """Whether any check failed."""
    return any(finding.status is Status.ERROR for finding in findings)


def mebibytes(amount_bytes: float) -> str:
    """Return bytes in MiB."""
    return f"{amount_bytes / (1 << 20):.0f} MiB"
