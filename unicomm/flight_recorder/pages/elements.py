"""The parts that pages share. A text that enters an element is escaped, unless it is `Html` already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from unicomm.flight_recorder.texts import ranks_text

_MOST_CHIPS = 12
_MANY_ROWS = 20  # more than these scroll under their heading
_SIGNS = {  # besides the colour of a verdict
    "bad": "M6.5 1.5h7l5 5v7l-5 5h-7l-5-5v-7zM7 7l6 6M13 7l-6 6",
    "warn": "M10 2.5L18.5 17h-17zM10 8v4.5M10 14.8v.1",
    "good": "M10 1.5a8.5 8.5 0 1 1 0 17a8.5 8.5 0 1 1 0-17M6 10.3l2.8 2.8L14 7.5",
}


class Html(str):
    """A text that is HTML: `element` escapes all others."""

    __slots__ = ()


def element(name: str, *content: str, **attributes: object) -> Html:
    """Returns an element. In names of attributes, "_" stands for "-"; `class_` is the class.

    An attribute that is None or False is left out; one that is True has no value.
    """
    words = [name]
    for given, value in attributes.items():
        if value is None or value is False:
            continue
        key = given.rstrip("_").replace("_", "-")
        words.append(key if value is True else f'{key}="{escape(str(value))}"')
    return Html(f"<{' '.join(words)}>{join(*content)}</{name}>")


def join(*content: str) -> Html:
    """Returns texts and elements, one after the other."""
    return Html("".join(one if isinstance(one, Html) else escape(one) for one in content))


def card(title: str, *content: str, class_: str = "") -> Html:
    return element("section", element("h2", title), *content, class_=f"card {class_}".strip())


def facts(named: Iterable[tuple[str, str]]) -> Html:
    """Returns names and values, side by side where there is room."""
    pairs = [element("div", element("dt", name), element("dd", value)) for name, value in named]
    return element("dl", *pairs, class_="facts")


def chips(ranks: Sequence[int], tone: str = "") -> Html:
    """Returns ranks as labels; many ranks become one label with their ranges."""
    if len(ranks) > _MOST_CHIPS:
        names = [ranks_text(ranks, 40).split(" ", 1)[1]]
    else:
        names = [str(rank) for rank in ranks]
    return join(*(element("span", name, class_=f"chip {tone}".strip()) for name in names))


def kind(name: str, tone: str, confidence: float | None = None) -> Html:
    """Returns the name of a verdict, with a sign for readers who do not see its colour."""
    sign = Html(f'<svg viewBox="0 0 20 20" aria-hidden="true"><path d="{_SIGNS[tone]}"/></svg>')
    sure = Html("")
    if confidence is not None:
        share = f"{max(0.0, min(1.0, confidence)):.0%}"
        bar = Html(f'<i aria-hidden="true"><b style="width:{share}"></b></i>')
        sure = element("span", f"confidence {share}", bar, class_="sure")
    return element("p", sign, name, sure, class_="kind")


def verdict(tone: str, name: str, sentence: str, *below: str, confidence: float | None = None) -> Html:
    """Returns the first part of a page: its answer in one sentence. `tone` is "bad", "warn" or "good"."""
    return element(
        "section",
        kind(name, tone, confidence),
        element("h1", sentence),
        *below,
        class_=f"card verdict {tone}",
    )


def finding(tone: str, name: str, sentence: str, *folded: str) -> Html:
    """Returns a verdict of lower rank, whose details are folded."""
    what = element("span", kind(name, tone), sentence, class_="what")
    return element(
        "details", element("summary", what), element("div", *folded), class_=f"card finding {tone}"
    )


def items(lines: Iterable[str], name: str = "ul") -> Html:
    return element(name, *(element("li", line) for line in lines))


def place(where: str, calls: Sequence[str]) -> Html:
    """Returns a place in the program; the calls that led there, the innermost first, are folded below."""
    if not calls:
        return element("code", where)
    lines = [element("li", element("code", call)) for call in calls]
    return element(
        "details", element("summary", element("code", where)), element("ol", *lines), class_="path"
    )


@dataclass(frozen=True)
class Column:
    """A column of a table. `number` columns are aligned to the right; `fixed` ones are not sorted."""

    title: str
    number: bool = False
    fixed: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell; `order` is its place in a sorted column where the text is not."""

    content: str
    order: float | None = None
    class_: str = ""


Row = tuple[str, Sequence["str | Cell"]]  # its tone and its cells, of which the first is its heading


def grid(
    title: str,
    columns: Sequence[Column],
    rows: Iterable[Row],
    sortable: bool = False,
) -> Html:
    """Returns a table of figures, sorted by its reader if it is `sortable`.

    Where it is wider than the window it scrolls; page.js lets the keyboard reach it then.
    """
    head = [
        element("th", c.title, scope="col", class_="number" if c.number else None, data_fixed=c.fixed)
        for c in columns
    ]
    body = []
    for tone, cells in rows:
        out = []
        for i, (column, cell) in enumerate(zip(columns, cells, strict=True)):
            one = cell if isinstance(cell, Cell) else Cell(cell)
            classes = " ".join(filter(None, ("number" if column.number else "", one.class_)))
            out.append(
                element(
                    "td" if i else "th",
                    one.content,
                    scope=None if i else "row",
                    class_=classes or None,
                    data_sort=None if one.order is None else f"{one.order:.15g}",
                )
            )
        body.append(element("tr", *out, class_=tone or None))
    made = element(
        "table",
        element("thead", element("tr", *head)),
        element("tbody", *body),
        class_="figures sortable" if sortable else "figures",
    )
    style = "scroll long" if len(body) > _MANY_ROWS else "scroll"
    return element("div", made, class_=style, role="region", aria_label=title)


def visible(value: float, whole: float) -> bool:
    """Returns whether a part of a bar is wide enough to be drawn, and so to be in the legend."""
    return value > whole * 0.002


def bar(parts: Iterable[tuple[str, float, str]], whole: float) -> Html:
    """Returns a bar of the visible parts of (name, value, text), where `whole` takes the full width."""
    drawn = [
        element(
            "i",
            class_=f"part-{name}",
            style=f"width:{value / whole:.2%}" if whole else None,
            title=f"{name} {text}",
        )
        for name, value, text in parts
        if visible(value, whole)
    ]
    return element("div", *drawn, class_="bar")


def legend(entries: Iterable[tuple[str, str]]) -> Html:
    """Returns what the parts of bars mean: pairs of the part's name and its meaning."""
    return element(
        "ul",
        *(element("li", element("i", class_=f"part-{name}"), meaning) for name, meaning in entries),
        class_="legend",
    )
