"""Hooks of the documentation's site (mkdocs.yml): what lies outside of docs/ becomes part of it.

The README is the front page. SECURITY.md, CONTRIBUTING.md and CHANGELOG.md are pages; examples and schemas
that pages link to are files beside them. Links are rewritten to where the site has their targets.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
_PAGES = {
    "README.md": "index.md",
    **{name: name for name in ("SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")},
}
_LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
_brought: dict[str, str] = {}  # a path from the root: where the site has it


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the pages, and each file outside of docs/ to which a page links."""
    for name, page in _PAGES.items():
        _brought[name] = page
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    for file in list(files.documentation_pages()):
        for match in _LINK.finditer(file.content_string):
            target = _from_root(file.src_uri, match[2])
            inside = target.startswith("docs/") or target in _brought
            if not inside and (ROOT / target).is_file():
                _brought[target] = "files/" + target
                files.append(File.generated(config, _brought[target], abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Rewrites the links of a page."""
    here = posixpath.dirname(page.file.src_uri)

    def rewrite(match: re.Match[str]) -> str:
        target = _from_root(page.file.src_uri, match[2])
        place = _brought.get(target, target.removeprefix("docs/"))
        if target.startswith("docs/") or target in _brought:
            return match[1] + posixpath.relpath(place, here or ".") + match[3]
        return match[0]

    return _LINK.sub(rewrite, markdown)


def _from_root(page: str, link: str) -> str:
    """Returns a link's target as a path from the root of the tree."""
    source = next((name for name, there in _PAGES.items() if there == page), "docs/" + page)
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
