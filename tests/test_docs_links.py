"""Every relative link of the documentation leads to a file that is there, and to a heading that it has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s#]*)(#[^)\s]*)?\)")


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them: lower case, no punctuation, hyphens for spaces, a number where one is there already."""
    found: dict[str, int] = {}
    names = set()
    for title in re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if name in found else name)
        found[name] = found.get(name, 0) + 1
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    for file, anchor in LINK.findall(without_code(page.read_text())):
        target = page.parent / file if file else page
        assert target.exists(), f"{page.name}: {file}"
        if anchor and target.suffix == ".md":
            assert anchor.removeprefix("#") in anchors(target), f"{page.name}: {file}{anchor}"


def test_anchors_are_those_of_the_headings(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# The `serve` command: start, stop\n```sh\n# no heading\n```\n## Use\n## Use\n")
    assert anchors(page) == {"the-serve-command-start-stop", "use", "use-1"}
