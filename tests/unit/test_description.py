"""What an index page shows of the package: README without links that lead nowhere there."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DESCRIBED = runpy.run_path(str(ROOT / "setup.py"))["described"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ADDRESS = "https://example.org/dualpath"


def targets(text: str) -> set[str]:
    """Where links and images lead, but for those in fences."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return {*re.findall(r"\]\(\s*([^)\s]+)", text), *re.findall(r'(?:src|href)="([^"]+)"', text)}


@pytest.mark.parametrize("repository", [None, ADDRESS])
def test_no_link_of_readme_is_relative(repository):
    assert any("://" not in target for target in targets(README))
    found = targets(DESCRIBED(README, repository, "1.2.3"))
    assert found
    assert all(target.startswith("https://") for target in found)


def test_links_lead_to_the_files_of_the_version():
    text = 'See [how to](docs/a.md#b) and <img src="docs/c.svg" alt="paths" width="9">.'
    assert DESCRIBED(text, ADDRESS, "1.2.3") == (
        f"See [how to]({ADDRESS}/blob/v1.2.3/docs/a.md#b) and "
        f'<img src="{ADDRESS}/raw/v1.2.3/docs/c.svg" alt="paths" width="9">.'
    )


def test_without_an_address_a_link_is_its_text_and_an_image_what_it_shows():
    text = 'See [how\nto](docs/a.md), [the paper](https://b.org), <img src="c.svg" alt="paths">.'
    assert DESCRIBED(text, None, "1.2.3") == "See how\nto, [the paper](https://b.org), *paths*."


def test_what_a_reader_types_stays_as_it_is():
    text = "```console\n$ a [b](c)\n```\n[b](c)\n"
    assert DESCRIBED(text, None, "1.2.3") == "```console\n$ a [b](c)\n```\nb\n"
