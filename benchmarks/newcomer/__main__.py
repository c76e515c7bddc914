"""A new user's first hour as a script: `make newcomer`.

Clones this repository into an empty folder and types the commands of README from top to bottom, in
a shell with a new home and without this shell's variables; servers run in a second terminal until
all requests are done, then get Ctrl-C.  Every command must succeed, print what README states and
write the files that it promises (``steps``).  Needs git and what README requires, but no
installation.

`--quick --here` types only commands that need neither an installation nor a cluster, in this
checkout.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.newcomer.steps import OTHER_MODES, Reader, Step, Typed, typed
from benchmarks.newcomer.terminal import CommandFailedError, Terminal

ROOT = Path(__file__).parents[2]
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
        self.rows.append((first, "as README says", time.monotonic() - began_s))

    def _check(self, step: Step, output: str) -> None:
        if step.says and re.search(step.says, output, re.MULTILINE) is None:
            raise CommandFailedError(f"the output does not match {step.says!r}")
        if step.leaves and not (self._reader.clone / step.leaves).is_file():
            raise CommandFailedError(f"it did not write {step.leaves}")

    def _serve(self, text: str, step: Step) -> str:
        """Start a server; further commands are typed in another terminal."""
        self._end_serving()
        server, self._terminal = self._terminal, self._new_terminal()
        self._serving = server, text, step
        output = server.begin(text, step.says, step.limit_s)
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.newcomer", description=__doc__)
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
    print(f"{total_s:7.1f} s  {'FAILED: ' + failure if failure else 'all as README says'}")
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
