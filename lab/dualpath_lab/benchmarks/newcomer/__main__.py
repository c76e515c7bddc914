"""A new user's first hour as a script: `make newcomer`.

Clones this repository into an empty folder and types the commands of README from top to bottom, in
a shell with a new home and without this shell's variables; servers run in a second terminal until
all requests are done, then get Ctrl-C.  Every command must succeed, print what README states and
write the files that it promises (``steps``).  Needs git and what README requires, but no
installation.  This is an acceptance test and no experiment of the harness: it has no numbers to
compare a rerun with.

`--quick --here` types only commands that need neither an installation nor a cluster, in this
checkout.
"""

import argparse
import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.docs_blocks import Block, blocks, commands

# ------------------------------------------------------------------------------------------- steps
# Expected results of README's commands; a command without an entry here fails the run.

#: Modes that `dualpath report` compares with, beside the one that README serves in.
OTHER_MODES = ("basic", "oracle")


@dataclass(frozen=True)
class Step:
    """Expected output and files of a command that begins with ``command``.

    ``prints`` is a regular expression of the output.  ``serves``: the command runs until Ctrl-C.
    Quick runs leave out commands that ``needs`` an installation or a cluster of real engines.
    """

    command: str
    prints: str = ""
    leaves: str = ""
    serves: bool = False
    needs: str = ""
    limit_s: float = 120.0


INSTALLATION, CLUSTER = "an installation", "a cluster"

STEPS = (
    Step("make demo", r"times as fast as Basic", "runs/demo/report.html", False, INSTALLATION, 3e3),
    Step("make test", r"\d+ passed", needs=INSTALLATION, limit_s=6e3),
    Step("make install", needs=INSTALLATION, limit_s=3e3),
    Step("source .venv/bin/activate"),
    Step("dualpath model smollm2", r"^/.+$"),
    Step("dualpath serve", r"endpoint", serves=True, needs=CLUSTER, limit_s=600.0),
    Step("python examples/ask_twice.py", r"second: .*cached_tokens [1-9]", needs=CLUSTER),
    Step("dualpath replay", leaves="dualpath.json", needs=CLUSTER, limit_s=600.0),
    Step("dualpath report", leaves="compare.html", needs=CLUSTER),
    # The numbers in README; the first run also compiles.
    Step("dualpath simulate --cluster paper-660b", r"(?s)3,139 s.*1,754 s.*1,655 s", limit_s=900.0),
    Step("dualpath simulate --cluster examples/cluster.toml", r"JCT", limit_s=300.0),
)


@dataclass(frozen=True)
class Typed:
    """One command to type, with its expected results."""

    block: Block
    text: str
    step: Step

    @property
    def place(self) -> str:
        """Its file and line."""
        return f"{self.block.page.name}:{self.block.line}"

    def made_small(self) -> "Typed":
        """Return it with options for a small run, which prints other numbers than README's."""
        if not self.block.run_with:
            return self
        return replace(
            self, text=f"{self.text} {self.block.run_with}", step=replace(self.step, prints="")
        )


@dataclass
class Reader:
    """Knows what stands for what: the folder that a command printed."""

    clone: Path
    values: dict[str, str] = field(default_factory=dict)

    def translated(self, text: str) -> str:
        """Return a command with placeholders replaced."""
        for word, value in self.values.items():
            text = re.sub(rf"\b{word}\b", value, text)
        return text

    def record(self, step: Step, output: str) -> None:
        """Record values that later commands need."""
        if step.command.startswith("dualpath model"):
            self.values["FOLDER"] = output.split()[-1]


def typed(readme: Path) -> list[Typed]:
    """Return README's commands in order; raises ``LookupError`` for one without an entry."""
    found = []
    for block in blocks(readme):
        if block.language == "console":
            texts = (" ".join(words) for words in commands(block))
            found += [Typed(block, text, _step_of(text, block)) for text in texts]
    return found


def _step_of(text: str, block: Block) -> Step:
    for step in STEPS:
        if text.startswith(step.command):
            return step
    raise LookupError(
        f"README.md:{block.line}: {text!r} has no entry in "
        "lab/dualpath_lab/benchmarks/newcomer/__main__.py"
    )


# ---------------------------------------------------------------------------------------- terminal
# A terminal: one shell; commands are typed into it and its output is read.

#: Printed by the shell after each command, with its exit code.
_DONE = "@@ended"


class CommandFailedError(Exception):
    """A command did not do what README states; the message has the end of its output."""


class Terminal:
    """A shell in ``folder``; ``show`` is called with each line of output."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str], show: Callable[[str], None]
    ) -> None:
        self._show = show
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._shell = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C must not reach this process
        )
        threading.Thread(target=self._read, daemon=True).start()

    def run(self, command: str, limit_s: float) -> str:
        """Type a command and return its output; raises ``CommandFailedError``."""
        self._type(command)
        output, code = self._until(_DONE, limit_s)
        if code != f"{_DONE} 0":
            raise CommandFailedError(f"exit code {code.removeprefix(_DONE)}: {_end(output)}")
        return output

    def begin(self, command: str, word: str, limit_s: float) -> str:
        """Type a command that serves; return its output up to a line with ``word``."""
        self._type(command)
        output, line = self._until(word, limit_s)
        if line.startswith(_DONE):
            raise CommandFailedError(f"it ended before it printed {word!r}: {_end(output)}")
        return f"{output}{line}\n"

    def interrupt(self, limit_s: float) -> str:
        """Press Ctrl-C; return the output; raises if the command then fails."""
        os.killpg(self._shell.pid, signal.SIGINT)
        output, code = self._until(_DONE, limit_s)
        if code != f"{_DONE} 0":
            raise CommandFailedError(f"Ctrl-C: exit code {code.removeprefix(_DONE)}")
        return output

    def close(self) -> None:
        """End the shell with all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._shell.pid, signal.SIGTERM)
        self._shell.wait()

    def _type(self, command: str) -> None:
        assert self._shell.stdin is not None
        # The shell itself must survive Ctrl-C, as an interactive one does.
        self._shell.stdin.write(f"trap : INT\n{command}\necho {_DONE} $?\n".encode())
        self._shell.stdin.flush()

    def _read(self) -> None:
        assert self._shell.stdout is not None
        for line in self._shell.stdout:
            self._lines.put(line.decode(errors="replace").rstrip("\r\n"))
        self._lines.put(None)

    def _until(self, word: str, limit_s: float) -> tuple[str, str]:
        """Return the output up to the line with ``word`` or to the command's end, and that line."""
        until_s, output = time.monotonic() + limit_s, ""
        while True:
            try:
                line = self._lines.get(timeout=max(until_s - time.monotonic(), 0))
            except queue.Empty:
                raise CommandFailedError(f"not done within {limit_s:g} s: {_end(output)}") from None
            if line is None:
                raise CommandFailedError(f"the shell ended: {_end(output)}")
            if word in line or line.startswith(_DONE):
                return output, line
            self._show(line)
            output += f"{line}\n"


def _end(output: str) -> str:
    return "\n".join(output.splitlines()[-15:])


ROOT = Path(__file__).parents[4]
#: Variables that a new account would have, too, such as proxies.
KEPT = ("PATH", "LANG", "TERM", "TMPDIR")
KEPT_BEGINNINGS = ("PIP_", "SSL_", "HTTP_", "HTTPS_", "NO_PROXY", "http", "no_proxy")
ACTIVATE = "source .venv/bin/activate"
_END_S = 120.0


class Newcomer:
    """Types README's commands into terminals in ``clone``; ``rows`` are the results."""

    def __init__(
        self,
        clone: Path,
        environment: Mapping[str, str],
        without: tuple[str, ...] = (),
        *,
        quick: bool,
    ) -> None:
        self.rows: list[tuple[str, str, float]] = []
        self._reader = Reader(clone)
        self._environment = environment
        self._without = without
        self._quick = quick
        self._serving: tuple[Terminal, str, Step] | None = None
        self._terminal = self._new_terminal()

    def type_all(self) -> None:
        """Type everything; raises ``CommandFailedError`` at the first that fails."""
        try:
            for one in typed(self._reader.clone / "README.md"):
                if reason := self._left_out(one):
                    self.rows.append((one.text.splitlines()[0], reason, 0.0))
                else:
                    self._type(one.made_small() if self._quick else one)
            self._end_serving()
        finally:
            self._terminal.close()
            if self._serving is not None:
                self._serving[0].close()

    def _left_out(self, one: Typed) -> str:
        if one.text.startswith(self._without):
            return "left out"
        return f"needs {one.step.needs}" if self._quick and one.step.needs else ""

    def _type(self, one: Typed) -> None:
        text, step = self._reader.translated(one.text), one.step
        if step.command == "dualpath report":
            self._replay_other_modes(text)
        first = text.splitlines()[0]
        print(f"\n$ {text}", flush=True)
        began_s = time.monotonic()
        try:
            if step.serves:
                output = self._serve(text, step)
            else:
                output = self._terminal.run(text, step.limit_s)
            self._check(step, output)
        except CommandFailedError as error:
            self.rows.append((first, "FAILED", time.monotonic() - began_s))
            raise CommandFailedError(f"{one.place}: {first}: {error}") from None
        self._reader.record(step, output)
        self.rows.append((first, "as in README", time.monotonic() - began_s))

    def _check(self, step: Step, output: str) -> None:
        if step.prints and re.search(step.prints, output, re.MULTILINE) is None:
            raise CommandFailedError(f"the output does not match {step.prints!r}")
        if step.leaves and not (self._reader.clone / step.leaves).is_file():
            raise CommandFailedError(f"it did not write {step.leaves}")

    def _serve(self, text: str, step: Step) -> str:
        """Start a server; further commands are typed in another terminal."""
        self._end_serving()
        server, self._terminal = self._terminal, self._new_terminal()
        self._serving = server, text, step
        output = server.begin(text, step.prints, step.limit_s)
        self._terminal.run(ACTIVATE, _END_S)
        return output

    def _end_serving(self) -> None:
        if self._serving is not None:
            (server, _, _), self._serving = self._serving, None
            server.interrupt(_END_S)
            server.close()

    def _replay_other_modes(self, report: str) -> None:
        """Replay the same trace on clusters in the other modes that README compares."""
        assert self._serving is not None
        _, serve, step = self._serving
        for mode in OTHER_MODES:
            print(f"\n(the same in mode {mode}, for `{report}`)", flush=True)
            self._serve(f"{serve.partition(' --mode ')[0]} --mode {mode}", step)
            replay = (
                "dualpath replay examples/agents.jsonl --endpoint http://127.0.0.1:8000"
                f" --json {mode}.json"
            )
            self._terminal.run(replay, step.limit_s)

    def _new_terminal(self) -> Terminal:
        return Terminal(self._reader.clone, self._environment, _show)


def _show(line: str) -> None:
    print(f"  {line}", flush=True)


@contextmanager
def clean_clone() -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield a clone of the committed files, and the variables of a new account."""
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        home, clone = Path(folder) / "home", Path(folder) / "dualpath"
        home.mkdir()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        variables = {
            name: value
            for name, value in os.environ.items()
            if name in KEPT or name.startswith(KEPT_BEGINNINGS)
        }
        yield clone, {**variables, "HOME": str(home)}


@contextmanager
def copied_checkout() -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield a folder with links to this checkout, for output files, and this environment."""
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        for path in ROOT.iterdir():
            if path.name != "runs" and path.suffix != ".jsonl":
                (Path(folder) / path.name).symlink_to(path)
        yield Path(folder), dict(os.environ)


def main(arguments: Sequence[str]) -> int:
    """Type README's commands; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m dualpath_lab.benchmarks.newcomer", description=__doc__
    )
    parser.add_argument("--quick", action="store_true", help="leave out installation and clusters")
    parser.add_argument("--here", action="store_true", help="use this checkout's .venv, no clone")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="COMMAND",
        help="leave out commands that begin with this",
    )
    chosen = parser.parse_args(arguments)
    # A shell's background job ignores Ctrl-C, and so would the servers that inherit this.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with ExitStack() as stack:
        place = copied_checkout() if chosen.here else clean_clone()
        without = tuple(chosen.without)
        newcomer = Newcomer(*stack.enter_context(place), without, quick=chosen.quick)
        failure = ""
        try:
            newcomer.type_all()
        except CommandFailedError as error:
            failure = str(error)
    print()
    for command, verdict, seconds in newcomer.rows:
        print(f"{seconds:7.1f} s  {verdict:16}  {command}")
    total_s = sum(seconds for _, _, seconds in newcomer.rows)
    print(f"{total_s:7.1f} s  {'FAILED: ' + failure if failure else 'all as in README'}")
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
