"""The result of a check: status, what was found, what is needed, and the remedy."""

import enum
from collections.abc import Iterable

import msgspec


class Status(enum.StrEnum):
    """Errors prevent an engine from serving; warnings cost speed or apply to some nodes only."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


class Finding(msgspec.Struct, frozen=True):
    """The result of one check; ``limit`` is the requirement, empty if there is none."""

    check: str
    status: Status
    found: str
    limit: str = ""
    remedy: str = ""


def ok(check: str, found: str, limit: str = "") -> Finding:
    """Return a finding that needs no action."""
    return Finding(check, Status.OK, found, limit)


def warning(check: str, found: str, limit: str, remedy: str) -> Finding:
    """Return a finding that costs speed or may be a problem."""
    return Finding(check, Status.WARNING, found, limit, remedy)


def error(check: str, found: str, limit: str, remedy: str) -> Finding:
    """Return a finding that prevents an engine on this node from serving."""
    return Finding(check, Status.ERROR, found, limit, remedy)


def has_errors(findings: Iterable[Finding]) -> bool:
    """Whether any check failed."""
    return any(finding.status is Status.ERROR for finding in findings)


def mebibytes(amount_bytes: float) -> str:
    """Return an amount formatted in MiB."""
    return f"{amount_bytes / (1 << 20):.0f} MiB"
