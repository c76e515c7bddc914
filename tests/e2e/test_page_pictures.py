"""Reports fit into any window; the picture command reports pages that do not."""

from pathlib import Path

import msgspec
import pytest
from tests.e2e.chromium import find_chromium
from tests.e2e.page_pictures import main
from tests.unit.test_report import REPORT

from dualpath.report import html
from dualpath.report.model import Table

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed")

#: A table with more columns than a telephone can show.
WIDE = Table("Wide", tuple(f"column {n}" for n in range(20)), (("1.5",) * 20,))


def test_a_report_with_a_wide_table_fits_and_looks_different_in_the_dark(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    report = msgspec.structs.replace(REPORT, blocks=(*REPORT.blocks, WIDE))
    page.write_text(html.page(report), encoding="utf-8")
    assert main([str(tmp_path / "taken"), str(page)]) == 0
    taken = {file.name: file.read_bytes() for file in (tmp_path / "taken").iterdir()}
    assert {*taken} == {f"report-{w}-{t}.png" for w in (1280, 390) for t in ("light", "dark")}
    assert len({*taken.values()}) == 4


def test_a_page_that_is_wider_than_a_telephone_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "wide.html"
    page.write_text("<!doctype html><body><p style='width: 800px'>words</p>", encoding="utf-8")
    assert main([str(tmp_path / "taken"), str(page)]) == 1
    output = capsys.readouterr().out
    assert "wide.html is wider than 390 px: P." in output
    assert "1280 px" not in output
