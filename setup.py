"""The package's description: README as it reads where the repository is not beside it.

An index page, or `pip show`, has the text of README and none of the files it links to.  Relative
links become those of the repository at the version's tag, once pyproject.toml names the repository;
until then a link is its text, and an image is its description.  All else is in pyproject.toml.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
#: In `[project.urls]`: where the repository can be read, with `blob` and `raw` below it.
REPOSITORY = "Repository"

#: Also a place on the page itself.
_ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*:|#")
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)")
_IMAGE = re.compile(r'<img src="(?P<target>[^"]+)" alt="(?P<text>[^"]*)"[^>]*>')


def described(readme: str, repository: str | None, version: str) -> str:
    """Return `readme` with no relative link; code in fences stays as it is."""
    parts = re.split(r"(^```.*?^```$)", readme, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = (_without_relative(part, repository, version) for part in parts[::2])
    return "".join(parts)


def _without_relative(text: str, repository: str | None, version: str) -> str:
    def link(found: re.Match[str]) -> str:
        if _ABSOLUTE.match(found["target"]):
            return found[0]
        if repository is None:
            return found["text"]
        return found[0].replace(found["target"], f"{repository}/blob/v{version}/{found['target']}")

    def image(found: re.Match[str]) -> str:
        if _ABSOLUTE.match(found["target"]):
            return found[0]
        if repository is None:
            return f"*{found['text']}*"
        return found[0].replace(found["target"], f"{repository}/raw/v{version}/{found['target']}")

    return _LINK.sub(link, _IMAGE.sub(image, text))


def project_version() -> str:
    """Return the version; the package itself may not be importable yet."""
    text = (ROOT / "src" / "dualpath" / "__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.*)"$', text, flags=re.MULTILINE)
    return str(version)


if __name__ == "__main__":
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    setup(
        long_description=described(
            (ROOT / "README.md").read_text(encoding="utf-8"),
            urls.get(REPOSITORY),
            project_version(),
        ),
        long_description_content_type="text/markdown",
    )
