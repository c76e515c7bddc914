"""Checks NIXL by opening an agent with the UCX backend; run with `python -m`, prints a report.

It runs in its own process because NIXL may crash: with rdma-core's user libraries loaded beside
those in the wheel, NIXL 1.5.1 from PyPI crashed while its process exited.
"""

import importlib.metadata
import sys

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.transport.nixl import NIXL_PACKAGES, load_nixl, nixl_errors, nixl_package, open_agent
from dualpath.transport.ucx_config import engine_config_text


class NixlReport(msgspec.Struct, frozen=True):
    """NIXL's version, its plugins, and the error of opening the UCX backend (empty: none).

    ``package`` is the imported one, which names its CUDA.
    """

    version: str
    plugins: tuple[str, ...]
    ucx_error: str
    package: str = NIXL_PACKAGES[0]


def report() -> NixlReport:
    """Open an agent; raises ``ConfigError`` if NIXL is not installed."""
    api = load_nixl()
    agent = open_agent("dualpath-doctor", progress_delay_us=None)
    package, error = nixl_package(), ""
    try:
        agent.create_backend("UCX", {"engine_config": engine_config_text({})})
    except nixl_errors(api) as failure:
        error = str(failure) or type(failure).__name__
    return NixlReport(
        version=importlib.metadata.version(package.replace("_", "-")),
        plugins=tuple(sorted(agent.get_plugin_list())),
        ucx_error=error,
        package=package,
    )


if __name__ == "__main__":
    try:
        sys.stdout.write("\n" + msgspec.json.encode(report()).decode() + "\n")
        sys.stdout.flush()
    except ConfigError as error:
        sys.exit(str(error))
