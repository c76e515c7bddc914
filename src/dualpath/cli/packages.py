"""Which packages a command needs beside dualpath's own, and what is said where one is missing."""

import importlib.util

from dualpath.core.extras import extra_with


def require_packages(*packages: str) -> None:
    """Raise ``ModuleNotFoundError`` for the first package that is not installed; import none."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(name=package)


def not_installed(error: ModuleNotFoundError) -> str | None:
    """Return the package that is missing and its remedy; None if one of its modules is.

    The latter is a package of another version, or a defect.
    """
    package = (error.name or "").partition(".")[0]
    brought_by = extra_with(package)
    if brought_by is None or importlib.util.find_spec(package) is not None:
        return None
    return f"the package {package}, which is not installed; {brought_by.remedy}"
