"""The frame of a page: one file without external resources, with the style and the scripts inside."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from .elements import Html, element, join

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(
    product: str,
    title: str,
    facts: Iterable[str],
    body: Iterable[str],
    scripts: Sequence[Path] = (),
    data: object = None,
) -> str:
    """Returns the text of a page.

    Args:
        product: what made the page: "trace" or "profile".
        title: the title of the window.
        facts: what was read, in a few words each; "" is left out.
        body: the elements of the page.
        scripts: files of scripts, besides the one that all pages have.
        data: what the scripts read, in the element with the id "data".
    """
    here = Path(__file__)
    brand = element("div", "unicomm ", element("span", product), class_="brand")
    listed = element("ul", *(element("li", fact) for fact in facts if fact))
    head = [
        Html('<meta charset="utf-8">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        element("title", f"{title} - unicomm {product}"),
        element("style", Html(here.with_name("page.css").read_text(encoding="utf-8"))),
    ]
    end = []
    if data is not None:
        text = json.dumps(data, separators=(",", ":"))
        # In a script element only "</" and "<!--" could end the data: escape their characters.
        text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
        end.append(element("script", Html(text), type="application/json", id="data"))
    files = [here.with_name("page.js"), *scripts]
    end += [element("script", Html(file.read_text(encoding="utf-8"))) for file in files]
    whole = element(
        "html",
        element("head", *head),
        element("body", element("header", brand, listed), element("main", *body), *end),
        lang="en",
    )
    return join(Html("<!doctype html>\n"), whole)
