"""Writes the tables of docs/torchcomms.md: python -m tests.torchcomms.names_page --write"""

import argparse
import re

from tests import ROOT
from tests.torchcomms.names import NAMES, SAME, VARIABLES

PAGE = ROOT / "docs" / "torchcomms.md"
BEGIN, END = "<!-- names: begin (make docs) -->", "<!-- names: end -->"


def counted():
    """Returns how many names are the same, differ, and are missing."""
    rows = [row for rows in NAMES.values() for row in rows]
    alike = sum(row.here and row.how == SAME for row in rows)
    absent = sum(not row.here for row in rows)
    return alike, len(rows) - alike - absent, absent


def tables():
    """Returns the text between the page's marks."""
    alike, other, absent = counted()
    lines = [f"{alike} names are the same, {other} differ, {absent} are not here.", ""]
    for section, rows in NAMES.items():
        lines += [f"### {section}", "", "| torchcomms | here |", "|---|---|"]
        grouped = {}
        for row in rows:  # enumerations take a line each otherwise
            short = row.theirs.rpartition(".") if row.path == row.theirs else ("", "", row.theirs)
            grouped.setdefault((short[0], row.verdict) if short[0] else (row.theirs, row.verdict), []).append(
                row
            )
        for (_, verdict), some in grouped.items():
            lines.append(f"| {', '.join(f'`{row.theirs}`' for row in some)} | {verdict} |")
        lines.append("")
    lines += ["### Environment variables", "", "| variable | here |", "|---|---|"]
    lines += [
        f"| {', '.join(f'`{v}`' for v in names.split(', '))} | {how} |" for names, how in VARIABLES.items()
    ]
    return "\n".join(lines)


def renewed(page):
    """Returns the page with new tables."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    assert pattern.search(page), f"{PAGE} has no marks"
    return pattern.sub(lambda _: f"{BEGIN}\n\n{tables()}\n\n{END}", page)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="renew docs/torchcomms.md")
    if parser.parse_args().write:
        PAGE.write_text(renewed(PAGE.read_text()))
    else:
        print(tables())


if __name__ == "__main__":
    main()
