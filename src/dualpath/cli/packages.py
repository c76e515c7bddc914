"""Checks for optional packages of a command, with the remedy if one is missing."""

import importlib.util

from dualpath.core.extras import extra_with


def require_packages(*packages: str) -> None:
    """Raise ``ModuleNotFoundError`` for the first missing package, without importing any."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(name=package)


def not_installed(error: ModuleNotFoundError) -> str | None:
    """Return the missing package and its remedy; None if an installed package lacks a module.

    The latter means an incompatible version of the package, or a defect.
    """
    package = (error.name or "").partition(".")[0]
    brought_by = extra_with(package)
    if brought_by is None or importlib.util.find_spec(package) is not None:
        return None
    return f"the package {package}, which is not installed; {brought_by.remedy}"
