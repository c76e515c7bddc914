"""Phase `nixl`: DRAM and VRAM of another process and of the same one, by READ and WRITE."""

import json
import os
import subprocess
import sys

from dualpath_lab.gpu.results import Check
from dualpath_lab.gpu.ucx import PROTOCOL_INFO, choices

#: UCX's transports that are tried: its own choice, without CUDA IPC, and TCP only.
_WAYS: dict[str, dict[str, str]] = {
    "default": {},
    "without CUDA IPC": {"UCX_TLS": "^cuda_ipc"},
    "TCP": {"UCX_TLS": "tcp,cuda_copy"},
}
_WAY_S = 45.0


def nixl(check: Check) -> None:
    """Run the pair of processes once for each choice of transports.

    Raises ``RuntimeError`` if bytes were wrong or a pair failed, after all of them.
    """
    check.put("rehearsal", check.settings.rehearse)
    rows: list[dict[str, object]] = []
    problems = []
    for way, variables in _WAYS.items():
        if not check.settings.on_gpus and "CUDA" in way:
            continue
        found, problem = _run(check, way, variables)
        rows += [{"UCX": way, **row} for row in found]
        check.put("transfers", rows)
        if problem:
            problems.append(f"{way}: {problem}")
    problems += [f"wrong bytes: {row}" for row in rows if row.get("right") is False]
    check.put("problems", problems)
    if problems:
        raise RuntimeError("; ".join(problems)[:600])


def _run(check: Check, way: str, variables: dict[str, str]) -> tuple[list[dict[str, object]], str]:
    device = check.device
    command = [
        *(sys.executable, "-m", "dualpath_lab.gpu.nixl_pair", device),
        str(check.settings.sizes.pair_pieces),
    ]
    tcp = {"UCX_TLS": "tcp"} if device == "cpu" and way == "TCP" else {}
    environment = {
        **os.environ, "UCX_NET_DEVICES": "lo", **PROTOCOL_INFO, **variables, **tcp,
    }  # fmt: skip
    log = check.logs / f"{way.replace(' ', '-')}.txt"
    with log.open("w+") as file:
        try:
            code: int | str = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment, timeout=_WAY_S
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"none after {_WAY_S:g} s"
    lines = log.read_text(errors="replace").splitlines()
    rows = [json.loads(line[1:]) for line in lines if line.startswith("@{")]
    check.put(f"UCX's choices, {way}", choices(lines))
    if code == 0 and rows:
        return rows, ""
    return rows, f"exit code {code}; {lines[-1][:300] if lines else 'no output'}"
