"""The fuzzers: reproducible inputs, findings, and files of every kind."""

import logging
from collections.abc import Callable

import pytest

from dualpath.cli.main import main
from dualpath.cli.settings import SECTIONS
from dualpath_lab.faults.fuzz.campaign import Campaign, Subject
from dualpath_lab.faults.fuzz.compressed_blocks import CompressedBlockSubject
from dualpath_lab.faults.fuzz.files import BlockSubject, SettingsSubject, TraceSubject
from dualpath_lab.faults.fuzz.inputs import Inputs
from dualpath_lab.faults.fuzz.sealed_blocks import SealedBlockSubject

VALID = {"a": [1, {"b": "text"}], "c": None}


def test_a_seed_and_a_number_determine_an_input():
    assert Inputs(7, 3).json(VALID) == Inputs(7, 3).json(VALID)
    different = {Inputs(7, number).json(VALID) for number in range(100)}
    assert len(different) > 50
    assert {Inputs(8, number).json(VALID) for number in range(100)} != different


@pytest.mark.parametrize(
    ("subject", "outcomes"),
    [
        (TraceSubject, {"taken", "refused"}),
        (lambda: SettingsSubject(SECTIONS), {"file refused", "file taken", "variable refused"}),
        (BlockSubject, {"taken", "short", "checksum", "bad header", "wrong key"}),
        (
            CompressedBlockSubject,
            {"taken", "short", "checksum", "bad header", "decompression"},
        ),
        (SealedBlockSubject, {"taken", "short", "not authentic", "bad header", "storage key"}),
    ],
    ids=["traces", "settings", "blocks", "compressed-blocks", "sealed-blocks"],
)
async def test_files_are_taken_or_refused(subject: Callable[[], Subject], outcomes: set[str]):
    result = await Campaign("files", subject(), seed=1, count=1500).run()
    assert result.findings == []
    assert outcomes <= set(result.outcomes)


class Breaking(BlockSubject):
    """Raises sometimes, writes errors to the log, and does not work afterwards."""

    async def run_input(self, given: object) -> str:
        number = self.played = getattr(self, "played", 0) + 1
        if number == 2:
            raise KeyError("defect")
        if number == 4:
            logging.getLogger("any").error("a thing failed")
        return "taken"

    async def still_works(self) -> None:
        raise AssertionError("gone")


async def test_failures_are_findings_and_are_shown():
    result = await Campaign("breaking", Breaking(), seed=1, count=6).run()
    assert [(each.number, each.what.split(":")[0]) for each in result.findings] == [
        (1, "KeyError"),
        (3, "log"),
        (-1, "does not work any more"),
    ]
    assert not result.is_clean
    assert result.outcomes == {"taken": 5}


def test_the_command_prints_the_result(capsys: pytest.CaptureFixture[str]):
    assert main(["chaos", "fuzz", "blocks", "--count", "50", "--json", "-"]) == 0
    assert '"findings_total":0' in capsys.readouterr().out.replace(" ", "")
    assert main(["chaos", "fuzz", "http"]) == 2
    assert "--endpoint http://HOST:PORT" in capsys.readouterr().err
