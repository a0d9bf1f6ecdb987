"""Short texts: lists of ranks ("0-3,8,10-14:2" stands for 0 1 2 3 8 10 12 14), durations, names of groups.

`printable` makes texts of files safe to show.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

# Control characters of terminals, characters that reverse or end lines, and halves of characters, which no
# encoding can print.
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """Returns a text of a file, such as a name, as one line that a terminal only shows.

    Control characters are written as Python writes them: "\\x1b[2J". Readers do this to all texts that
    reports show, so that no report can be forged, and no terminal controlled, by names in a dump.
    """
    if text.isascii() and text.isprintable():
        return text
    return _UNPRINTABLE.sub(lambda found: repr(found[0])[1:-1], text)


def format_ranks(ranks: Iterable[int]) -> str:
    """Returns `ranks` as text, in their order; ranks at equal distances become one range."""
    if isinstance(ranks, range) and ranks.step > 0 and len(ranks) > 2:
        return f"{ranks[0]}-{ranks[-1]}" + ("" if ranks.step == 1 else f":{ranks.step}")
    items = list(ranks)
    parts = []
    at = 0
    while at < len(items):
        end = at + 1
        step = items[end] - items[at] if end < len(items) else 0
        while end < len(items) and step > 0 and items[end] - items[end - 1] == step:
            end += 1
        if end - at >= 3 or (end - at == 2 and step == 1):
            parts.append(f"{items[at]}-{items[end - 1]}" + ("" if step == 1 else f":{step}"))
            at = end
        else:
            parts.append(str(items[at]))
            at += 1
    return ",".join(parts)


#: Ranks of a job are less. A greater number in a file is damage: each rank takes memory, and time to find out
#: who waits for it.
MOST_RANKS = 1 << 18


def rank_ranges(text: str, limit: int = 1 << 24) -> list[range]:
    """Returns the ranks in a text of `format_ranks` as ranges, which take no memory for each rank.

    Raises `ValueError` for any other text, for more than `limit` ranks, and for ranks that no job has.
    """
    out: list[range] = []
    count = 0
    for part in text.split(",") if text else []:
        span, _, step = part.partition(":")
        first, dash, last = span.partition("-")
        begin, end, by = int(first), int(last) if dash else int(first), int(step) if step else 1
        if begin < 0 or end < begin or by < 1 or end >= MOST_RANKS:
            raise ValueError(f"'{part}' is not a range of ranks")
        out.append(range(begin, end + 1, by))
        count += len(out[-1])
        if count > limit:
            raise ValueError(f"'{part}' is not a range of ranks")
    return out


def parse_ranks(text: str, limit: int = 1 << 24) -> list[int]:
    """Returns the ranks in a text of `format_ranks`; raises as `rank_ranges`."""
    return list(chain.from_iterable(rank_ranges(text, limit)))


def ranks_text(ranks: Iterable[int], most: int = 60) -> str:
    """Returns "rank 3" or "ranks 0-2, 5", sorted; a list of more than `most` characters is cut."""
    several = sorted(ranks)
    text = ", ".join(_runs(several))
    if len(text) > most:
        text = format_ranks(several).replace(",", ", ")  # ranges with steps are shorter, but harder to read
    if len(text) > most:
        text = text[:most].rsplit(",", 1)[0] + f", ... ({len(several)} ranks)"
    return f"rank{'' if len(several) == 1 else 's'} {text}"


def _runs(ranks: list[int]) -> Iterator[str]:
    at = 0
    while at < len(ranks):
        end = at
        while end + 1 < len(ranks) and ranks[end + 1] == ranks[end] + 1:
            end += 1
        yield f"{ranks[at]}-{ranks[end]}" if end > at + 1 else ", ".join(map(str, ranks[at : end + 1]))
        at = end + 1


def span(ns: float) -> str:
    """Returns a duration, in nanoseconds, with three digits and a unit: "1.5 ms"."""
    for unit, size in (("h", 3.6e12), ("min", 6e10), ("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if abs(ns) >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns:.0f} ns"


def capital(text: str) -> str:
    """Returns `text` with an upper-case first letter."""
    return text[:1].upper() + text[1:]


def _members(ranks: Sequence[int], most: int = 60) -> str:
    """Returns "ranks 0-1", as names of groups have it; a list of more than `most` characters is cut."""
    text = format_ranks(ranks)
    if len(text) > most:
        text = text[:most].rsplit(",", 1)[0] + f",... {len(ranks)} in all"
    return f"ranks {text}"


def tell_apart(groups: Sequence[tuple[str, Sequence[int], str]]) -> list[str]:
    """Returns a name for each group, given as (name, ranks, backend), which no other group has.

    Groups that share a name get their ranks and, if these are the same, their backend or a number added.
    """
    names = [name for name, _, _ in groups]
    keys: list[tuple[str, ...]] = [(name,) for name in names]
    for texts in ([_members(ranks) for _, ranks, _ in groups], [backend for _, _, backend in groups]):
        several: dict[tuple[str, ...], set[str]] = {}
        for key, text in zip(keys, texts, strict=True):
            several.setdefault(key, set()).add(text)
        for i, text in enumerate(texts):
            if len(several[keys[i]]) > 1:
                names[i] += f" ({text})"
        keys = [(*key, text) for key, text in zip(keys, texts, strict=True)]
    seen: Counter[str] = Counter()
    taken = set(names)
    for i, name in enumerate(names):
        seen[name] += 1
        if seen[name] > 1:
            while (numbered := f"{name} #{seen[name]}") in taken:
                seen[name] += 1
            names[i] = numbered
            taken.add(numbered)
    return names
