"""`.env.example` and the README's knob table, generated from the settings. `python -m …knob_docs` rewrites both."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from qwen_nvfp4_serve.settings import default_of, knobs

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- knobs: generated, see docs/development.md -->", "<!-- end of knobs -->"


def env_example() -> str:
    """The text of `.env.example`: every knob commented out with its default, description and unit, by group."""
    lines = ["# Copy to .env and change what you need. The environment wins over this file.", ""]
    group = ""
    for name, field in knobs().items():
        extra = _extra(field)
        if extra["group"] != group:
            group = extra["group"]
            lines += [f"# --- {group} ---", ""]
        unit = f" [{extra['unit']}]" if extra["unit"] else ""
        lines += [f"# {field.description}{unit}", f"#{name}={default_of(name)}", ""]
    return "\n".join(lines)


def knob_table() -> str:
    """The README's table in Markdown."""
    rows = ["| knob | default | what it does |", "|---|---|---|"]
    for name, field in knobs().items():
        unit = f" [{_extra(field)['unit']}]" if _extra(field)["unit"] else ""
        default = default_of(name)
        rows.append(f"| `{name}` | {f'`{default}`' if default else 'unset'} | {field.description}{unit} |")
    return "\n".join(rows)


def with_table(readme: str) -> str:
    """`readme` with the table between its markers brought up to date. Raises ValueError without both markers."""
    before, found, rest = readme.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise ValueError(f"README.md lacks {BEGIN} … {END}")
    return f"{before}{BEGIN}\n{knob_table()}\n{END}{after}"


def _extra(field: FieldInfo) -> Mapping[str, Any]:
    extra = field.json_schema_extra
    if not isinstance(extra, dict):
        raise TypeError(f"a settings field without group and unit: {field.description}")
    return extra


def main() -> int:
    """Rewrite both files in the checkout this module was installed from."""
    (ROOT / ".env.example").write_text(env_example())
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
