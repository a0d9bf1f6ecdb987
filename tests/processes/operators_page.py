"""The table in docs/torch-symmetric-memory.md, made of the kernels there are: operators_page.py --write"""

import argparse
from pathlib import Path

from unicomm.extensions.build_torch_extension import build
from unicomm.extensions.torch_extensions import SYMMETRIC_MEMORY
from unicomm.symm.torch_operators import known_operators, load_unit

PAGE = Path(__file__).parent.parent.parent / "docs" / "torch-symmetric-memory.md"
BEGIN, END = "<!-- operations: made by `make docs` -->\n", "<!-- end of operations -->\n"


def table():
    """One row for each way of running, with the operations that run so, declared by this torch or not."""
    rows = {}
    for name, how in sorted(known_operators(load_unit()).items()):
        rows.setdefault(how, []).append(f"`{name}`")
    lines = [f"| {how} | {' '.join(names)} |" for how, names in sorted(rows.items())]
    return "\n".join(["| runs | operations of `torch.ops.symm_mem` |", "|---|---|", *lines, ""])


def renewed(page):
    before, rest = page.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="renew the page")
    options = parser.parse_args()
    build(SYMMETRIC_MEMORY)
    if options.write:
        PAGE.write_text(renewed(PAGE.read_text()))
    else:
        print(table())


if __name__ == "__main__":
    main()
