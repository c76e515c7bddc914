"""The fork server: its imported modules, and when it is replaced."""

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

#: A separate program, as the fork server of the tests' process has imported vLLM already.
_STORY = """
import sys
from pathlib import Path
from dualpath.launch.fork_server import ForkedProcess

def forked(name, *preload):
    return ForkedProcess(name, "tests.unit.test_launch_fork_server:write_cpus", sys.argv[1:2],
                         Path(sys.argv[1]) / name, preload=preload)

def joined(*processes):
    for process in processes:
        process.wait_for_line("imported", 30)
    for process in processes:
        process.kill()
        process.wait(30)

joined(forked("first", "colorsys"), forked("early", "wave"))
joined(forked("late", "wave"))
joined(forked("last", "colorsys"))
"""


def write_cpus() -> None:
    """Print the modules that the server has imported, and wait for a signal."""
    frozen = ["frozen"] if gc.get_freeze_count() else []
    found = [name for name in ("colorsys", "wave") if name in sys.modules]
    print("imported:", *frozen, *found, flush=True)
    signal.pause()


def test_a_server_without_a_module_is_replaced_when_it_has_no_running_processes(
    tmp_path: Path,
) -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"}
    argv = [sys.executable, "-c", _STORY, str(tmp_path)]
    subprocess.run(argv, env=environment, check=True, timeout=120)
    cpus = {path.name: path.read_text().split()[1:] for path in tmp_path.iterdir()}
    assert cpus == {
        "first": ["frozen", "colorsys"],
        "early": ["frozen", "colorsys"],
        "late": ["frozen", "colorsys", "wave"],
        "last": ["frozen", "colorsys", "wave"],
    }
