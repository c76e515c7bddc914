r"""Pictures of HTML files, each as wide as a desk's screen and a telephone, light and dark.

    make docs demo
    PYTHONPATH=src:. .venv/bin/python -m tests.e2e.page_pictures FOLDER \
        runs/demo/report.html build/docs/{README,docs/how-to/size,docs/reference/settings}.html

The pictures are for inspection.  Errors found automatically are printed: a page wider than
its window, and the elements that are.  The exit code is 1 then.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.chromium import THEMES, WIDTHS, Tab, chromium_for, open_tab

#: Elements beyond the right edge that are in no scrolling container.
_TOO_WIDE = """(() => {
  const scrolls = (node) => node && node !== document.body && node !== document.documentElement
    && (getComputedStyle(node).overflowX !== 'visible' || scrolls(node.parentElement));
  if (document.documentElement.scrollWidth <= innerWidth) return [];
  return [...document.body.querySelectorAll('*')]
    .filter((node) => node.getBoundingClientRect().right > innerWidth + 1 && !scrolls(node))
    .map((node) => node.tagName + '.' + node.className).slice(0, 5);
})()"""


async def pictures(tab: Tab, page: Path, folder: Path) -> list[str]:
    """Take a page in each width and theme; return what is wrong with it."""
    wrong = []
    for theme in THEMES:
        await tab.prefer(theme)
        for width in WIDTHS:
            await tab.size(width, 900)
            await tab.go(page.resolve().as_uri())
            if found := await tab.value(_TOO_WIDE):
                wrong.append(f"{page} is wider than {width} px: {', '.join(found)}")
            await tab.picture(folder / f"{page.stem}-{width}-{theme}.png", whole=True)
    return wrong


async def run(folder: Path, pages: list[Path], devtools: str) -> list[str]:
    """Take all pictures; return what is wrong."""
    async with open_tab(devtools) as tab:
        wrong = [problem for page in pages for problem in await pictures(tab, page, folder)]
        return [*wrong, *tab.troubles]


def main(words: Sequence[str] | None = None) -> int:
    """Run the command with these words, those of the command line if None."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument("pages", type=Path, nargs="+", metavar="PAGE.html")
    args = parser.parse_args(words)
    with chromium_for(parser) as (devtools, _):
        args.folder.mkdir(parents=True, exist_ok=True)
        wrong = asyncio.run(run(args.folder, args.pages, devtools))
    print("\n".join(wrong) or "no page is wider than its window")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
