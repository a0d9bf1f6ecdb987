"""Speed of the wire formats on one core: encode, encode with a residual, decode, decode and add.

    python -m benchmarks.wire_formats

Gigabytes of float32 a second, 16 MiB in memory, median and best of interleaved turns, for each instruction
set of this machine. A copy of the same tensor stands beside them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from unicomm import _core
from unicomm.comms.operations.wire import WireFormat


def jobs(count: int) -> dict[tuple[str, str], Callable[[], object]]:
    """What is measured, by format and step."""
    x, out, total = torch.randn(count), torch.empty(count), torch.zeros(count)
    residual = torch.zeros(count)
    found: dict[tuple[str, str], Callable[[], object]] = {("float32", "copy"): lambda: out.copy_(x)}
    for format in WireFormat:
        data = torch.empty(format.bytes_of(count), dtype=torch.uint8)
        _core.wire_encode(data, x, format)

        def encode(
            data: torch.Tensor = data, format: WireFormat = format, kept: torch.Tensor | None = None
        ) -> None:
            _core.wire_encode(data, x, format, residual=kept)

        def stochastic(data: torch.Tensor = data, format: WireFormat = format) -> None:
            _core.wire_encode(data, x, format, 1.0, True, 7)

        def decode(data: torch.Tensor = data, format: WireFormat = format, add: bool = False) -> None:
            _core.wire_decode(total if add else out, data, format, add)

        found[format.text, "encode"] = encode
        found[format.text, "encode, keep"] = lambda encode=encode: encode(kept=residual)
        found[format.text, "encode, stochastic"] = stochastic
        found[format.text, "decode"] = decode
        found[format.text, "decode, add"] = lambda decode=decode: decode(add=True)
    return found


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--count", type=int, default=4 << 20, help="elements (default: 4 Mi)")
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title="GB/s of float32 on one core: median (best)")
    todo = jobs(options.count)
    isas = [isa for isa in ("avx512", "avx2", "baseline") if _core.set_fold_isa(isa)]
    for column in ("format", "step", *isas):
        table.add_column(column)
    seconds: dict[tuple[str, str, str], list[float]] = {}
    for _ in range(options.turns):
        for isa in isas:
            _core.set_fold_isa(isa)
            for (format, step), job in todo.items():
                began = time.perf_counter()
                job()
                seconds.setdefault((format, step, isa), []).append(time.perf_counter() - began)
    for format, step in todo:
        speeds = [[options.count * 4e-9 / t for t in seconds[format, step, isa]] for isa in isas]
        table.add_row(format, step, *(f"{statistics.median(s):.1f} ({max(s):.1f})" for s in speeds))
    Console().print(table)
    print(f"load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
