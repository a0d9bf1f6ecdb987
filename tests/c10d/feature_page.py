"""docs/torch-features.md, made by running the programs that it is about: python feature_page.py --write"""

import argparse
import json
import re
import sys

from tests import ROOT
from tests.c10d.launch import PROGRAMS, torchrun

PAGE = ROOT / "docs" / "torch-features.md"
HEAD = """# What of torch.distributed runs on unicomm

Made by `make docs` from runs of two ordinary programs that say nothing of unicomm, and compared with new
runs by the tests.

## Features

`tests/c10d/programs/features.py`, on 2 ranks, with `auto` on 4. "yes": it ran and every result
was right. "switch" is `TORCH_DISTRIBUTED_USE_TORCHCOMMS=1` with `UNICOMM_BACKEND` as named; the last is
`init_process_group("unicomm")` without it. "no (torch)": torch refuses before unicomm is asked.

"""
CONSUMERS_HEAD = """
## What builds upon it

`tests/c10d/programs/consumers.py` trains or runs each of these on fixed seeds, on 2 and on 4
ranks, on stock Gloo and with the switch on, and the tests compare losses, gradients and weights: equal within
float rounding.

"""
SYMMETRIC = """
## Symmetric memory

`torch.distributed._symmetric_memory` and `torch.ops.symm_mem` run on CPU tensors after
`unicomm.symm.use_in_torch()`: [torch-symmetric-memory.md](torch-symmetric-memory.md) says which operations.
"""
SWITCH = {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1"}
# Column: ranks, the program's argument, environment.
CONTENDERS = {
    "stock Gloo": (2, "gloo", {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "0"}),
    "switch, shm": (2, "gloo", SWITCH | {"UNICOMM_BACKEND": "shm"}),
    "switch, gloo": (2, "gloo", SWITCH | {"UNICOMM_BACKEND": "gloo"}),
    "switch, auto": (4, "gloo", SWITCH | {"UNICOMM_BACKEND": "auto"}),
    '"unicomm"': (2, "unicomm", {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "0"}),
}


def results(contender):
    """What each rank said, and stderr."""
    ranks, argument, env = CONTENDERS[contender]
    done = torchrun(ranks, PROGRAMS / "features.py", argument, **env)
    found = re.findall(r'\{"group": .*?\}\}', done.stdout)
    assert len(found) == ranks, done.stdout[-3000:] + done.stderr[-6000:]
    return [json.loads(text) for text in found], done.stderr


def cell(text):
    """How a result is written."""
    if text == "ok":
        return "yes"
    return "no (torch)" if text.startswith(("NotImplementedError", "ValueError", "RuntimeError")) else "no"


def column(said):
    """Feature -> cell, of all ranks together."""
    every = {name: [rank["results"][name] for rank in said] for name in said[0]["results"]}
    return {name: cell(next((text for text in texts if text != "ok"), "ok")) for name, texts in every.items()}


def written():
    """The page's table: contender -> feature -> cell."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    rows = [re.split(r" *\| *", line.strip("| ")) for line in lines]
    heads, rows = rows[0][1:], rows[2:]
    return {head: {row[0].strip("`"): row[i + 1] for row in rows} for i, head in enumerate(heads)}


def consumers():
    return re.findall(r"^@consumer\ndef (\w+)", (PROGRAMS / "consumers.py").read_text(), re.MULTILINE)


def page(columns):
    features = next(iter(columns.values()))
    lines = [f"| feature | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| `{name}` | {' | '.join(c[name] for c in columns.values())} |" for name in features]
    listed = [f"- {name.replace('_', ' ')}" for name in consumers()]
    return HEAD + "\n".join(lines) + "\n" + CONSUMERS_HEAD + "\n".join(listed) + "\n" + SYMMETRIC


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="renew docs/torch-features.md")
    options = parser.parse_args()
    columns = {}
    for contender in CONTENDERS:
        print(f"running: {contender}", file=sys.stderr, flush=True)
        columns[contender] = column(results(contender)[0])
    made = page(columns)
    if options.write:
        PAGE.write_text(made)
    else:
        print(made)


if __name__ == "__main__":
    main()
