"""Expected results of README's commands; a command without an entry here fails the run."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.docs_blocks import Block, blocks, commands

#: Modes that `dualpath report` compares with, beside the one that README serves in.
OTHER_MODES = ("basic", "oracle")


@dataclass(frozen=True)
class Step:
    """Expected output and files of a command that begins with ``command``.

    ``says`` is a regular expression of the output.  ``serves``: the command runs until Ctrl-C.
    Quick runs leave out commands that ``needs`` an installation or a cluster of real engines.
    """

    command: str
    says: str = ""
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
        """Return it with options for a small run, whose numbers differ from README's."""
        if not self.block.run_with:
            return self
        return replace(
            self, text=f"{self.text} {self.block.run_with}", step=replace(self.step, says="")
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
        f"README.md:{block.line}: {text!r} has no entry in benchmarks/newcomer/steps.py"
    )
