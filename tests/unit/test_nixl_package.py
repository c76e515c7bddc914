"""Which of NIXL's packages is imported: one for each CUDA."""

import sys
from pathlib import Path

import pytest

from dualpath.core.extras import extra
from dualpath.transport.nixl import NIXL_PACKAGES, nixl_package


def install(folder: Path, *packages: str, torch_cuda: str = "") -> None:
    for package in packages:
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text("raise AssertionError('imported')\n")
    (folder / "torch").mkdir()
    (folder / "torch/__init__.py").write_text("raise AssertionError('imported')\n")
    (folder / "torch/version.py").write_text(f"cuda: Optional[str] = {torch_cuda or None!r}\n")


@pytest.mark.parametrize(
    ("packages", "torch_cuda", "chosen"),
    [
        ((), "", "nixl_cu12"),
        (("nixl_cu12",), "13.0", "nixl_cu12"),
        (("nixl_cu13",), "", "nixl_cu13"),
        (("nixl_cu13",), "12.9", "nixl_cu13"),
        (NIXL_PACKAGES, "13.0", "nixl_cu13"),
        (NIXL_PACKAGES, "12.9", "nixl_cu12"),
        (NIXL_PACKAGES, "", "nixl_cu12"),
        (NIXL_PACKAGES, "14.1", "nixl_cu12"),
    ],
)
def test_the_installed_package_is_chosen_and_of_two_that_of_torchs_cuda(
    packages: tuple[str, ...],
    torch_cuda: str,
    chosen: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(tmp_path, *packages, torch_cuda=torch_cuda)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    for name in (*NIXL_PACKAGES, "torch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert nixl_package() == chosen


def test_every_package_has_an_extra() -> None:
    assert (*extra("nixl").imports, *extra("nixl-cu13").imports) == NIXL_PACKAGES
