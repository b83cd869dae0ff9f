"""Hooks of mkdocs: decisions get entries in the navigation, and ``no-run`` blocks become plain ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DECISIONS = Path(__file__).parent / "decisions"
_LIST_MARKER = "<!-- list of decisions -->"


def decision_titles() -> dict[str, str]:
    """Return ``{file name: title}`` of every decision, sorted by file name. The title is the first heading."""
    titles = {}
    for path in sorted(DECISIONS.glob("*.md")):
        if path.name != "index.md":
            heading = path.read_text(encoding="utf-8").partition("\n")[0]
            titles[path.name] = heading.lstrip("# ").strip() or path.stem
    return titles


def on_config(config: Any) -> Any:
    """Replace ``decisions/index.md`` in the navigation by a section with all files of the folder."""
    pages = [{title: f"decisions/{name}"} for name, title in decision_titles().items()]
    for group in config.nav:
        for entries in group.values():
            if isinstance(entries, list) and {"Decisions": "decisions/index.md"} in entries:
                entries[entries.index({"Decisions": "decisions/index.md"})] = {
                    "Decisions": [{"Overview": "decisions/index.md"}, *pages]
                }
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Write the list of decisions, and drop the reasons behind ``no-run``, which only the tests read."""
    markdown = re.sub(r"^( *```(?:python|bash)) no-run.*$", r"\1", markdown, flags=re.MULTILINE)
    if page.file.src_uri != "decisions/index.md":
        return markdown
    lines = [f"- [{title}]({name})" for name, title in decision_titles().items()] or ["None yet."]
    return markdown.replace(_LIST_MARKER, "\n".join(lines))
