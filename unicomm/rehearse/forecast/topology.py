"""Topologies: the links and cores of a machine, from a preset, a TOML file, or measurements."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

GB = 1e9
#: Operation -> number of ranks -> (bytes, seconds), by increasing bytes.
Measured = Mapping[str, Mapping[int, list[tuple[float, float]]]]


@dataclass(frozen=True)
class Link:
    """A class of links.

    Attributes:
        latency: seconds of one step of an algorithm. bandwidth: bytes a second in one direction.
        shared: whether the ranks of a node share that bandwidth; else each rank has it.
        cpu: the part of an operation's time in which it keeps a core of its rank busy.
    """

    latency: float
    bandwidth: float
    shared: bool = False
    cpu: float = 0.0


@dataclass(frozen=True)
class Topology:
    """A machine.

    Attributes:
        name: what reports call it.
        within, between: the links inside of a node and between nodes.
        cores: of a node, for ranks that compute on the CPU; 0 for ranks with a device each.
        speed: how much faster a rank computes there than in the rehearsal.
        crowded: by how many ranks of a node compute at once: how much longer each takes than one alone. It
            was measured; without it, each has its part of `cores`.
        measured_within, measured_between: times of operations whose ranks share a node, or have one each.
    """

    name: str
    within: Link
    between: Link
    cores: int = 0
    speed: float = 1.0
    crowded: Mapping[int, float] = field(default_factory=dict)
    measured_within: Measured = field(default_factory=dict)
    measured_between: Measured = field(default_factory=dict)


_GPU_SPEED = 1.0
#: Latencies are of a step between two ranks; bandwidths are those of the vendors' sheets, in one direction:
#: NVLink 4 (18 links of 25 GB/s), Infinity Fabric of MI300X (7 links of 64 GB/s), a DDR5 server's copies.
PRESETS = {
    "8xH100": Link(4e-6, 450 * GB),
    "8xMI300X": Link(6e-6, 448 * GB),
    "cpu": Link(5e-6, 10 * GB, shared=True, cpu=1.0),
}
_NETWORK = re.compile(r"([1-9][0-9]{0,8})G")


def load(text: str) -> Topology:
    """Returns a preset, as "8xH100+400G", or the topology of a TOML file.

    The network of a preset is in Gbit/s, for each GPU, or for a host of CPUs. Raises `ValueError` for a text
    that is neither, and for files that say something else.
    """
    if Path(text).suffix == ".toml" or Path(text).is_file():
        return _from_file(Path(text))
    machine, _, network = text.partition("+")
    speed = _NETWORK.fullmatch(network) if network else None
    if machine not in PRESETS or (network and speed is None):
        known = ", ".join(f"{name}+400G" for name in PRESETS)
        raise ValueError(f"the topology {text!r} is unknown: presets are like {known}; or name a TOML file")
    gbits = int(speed[1]) if speed else 100
    on_cpu = machine == "cpu"
    between = Link(3e-5 if on_cpu else 8e-6, gbits * GB / 8, shared=on_cpu, cpu=0.2 * on_cpu)
    return Topology(text, PRESETS[machine], between, cores=64 if on_cpu else 0, speed=_GPU_SPEED)


def _from_file(path: Path) -> Topology:
    try:
        import tomllib
    except ImportError:
        try:
            import tomli as tomllib  # type: ignore[import-not-found, no-redef]
        except ImportError:
            raise ValueError("a TOML file needs Python 3.11, or the package tomli") from None
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    return from_table(data, str(path))


def from_table(data: Mapping[str, Any], name: str) -> Topology:
    """Returns the topology of a table as a TOML file has it. Raises `ValueError` if it is none."""
    base = load(str(data["preset"])) if "preset" in data else Topology(name, PRESETS["cpu"], PRESETS["cpu"])
    known = {"preset", *(one.name for one in fields(Topology))}
    if unknown := set(data) - known:
        unknown_names, known_names = (", ".join(sorted(names)) for names in (unknown, known))
        raise ValueError(f"{name}: {unknown_names} is not among {known_names}")
    try:
        return replace(
            base,
            name=str(data.get("name", name)),
            within=_link(data.get("within", {}), base.within),
            between=_link(data.get("between", {}), base.between),
            cores=int(_number("cores", data.get("cores", base.cores))),
            speed=_number("speed", data.get("speed", base.speed), positive=True),
            crowded={
                int(n): _number("crowded", f, positive=True) for n, f in data.get("crowded", {}).items()
            },
            measured_within=_measured(data.get("measured_within", {})),
            measured_between=_measured(data.get("measured_between", {})),
        )
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{name}: {error}") from None


def slowdown(topology: Topology, local: int) -> float:
    """Returns how much longer a rank computes there if `local` ranks of its node do so, at least 1."""
    known = topology.crowded.get(local)
    if known is None and topology.cores:
        known = local / topology.cores
    return max(1.0, known or 1.0)


def _link(data: Mapping[str, Any], base: Link) -> Link:
    if unknown := set(data) - {one.name for one in fields(Link)}:
        raise ValueError(f"a link has no {', '.join(sorted(unknown))}")
    link = replace(base, **data)
    _number("latency", link.latency)
    _number("bandwidth", link.bandwidth, positive=True)
    _number("cpu", link.cpu)
    return link


def _number(name: str, value: object, positive: bool = False) -> float:
    """Returns a number of a file. Raises `ValueError` if it is none, negative, or 0 where that cannot be."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf
    if not good or (positive and not value):
        raise ValueError(
            f"{name} is {value!r}, and has to be a number {'above 0' if positive else 'from 0 on'}"
        )
    return float(value)  # type: ignore[arg-type]


def _measured(data: Mapping[str, Any]) -> Measured:
    if not all(points for by_size in data.values() for points in by_size.values()):
        raise ValueError("a measured operation has no times")
    return {
        op: {
            int(n): sorted((_number("bytes", a), _number("seconds", b, positive=True)) for a, b in points)
            for n, points in by_size.items()
        }
        for op, by_size in data.items()
    }


def to_toml(topology: Topology) -> str:
    """Returns a topology as a TOML file that `load` reads."""
    lines = [f"name = {json.dumps(topology.name)}", f"cores = {topology.cores}", f"speed = {topology.speed}"]
    for where, link in (("within", topology.within), ("between", topology.between)):
        lines.append(f"\n[{where}]")
        lines += [f"{one.name} = {json.dumps(getattr(link, one.name))}" for one in fields(Link)]
    if topology.crowded:
        lines.append("\n[crowded]")
        lines += [f"{n} = {factor:.3f}" for n, factor in topology.crowded.items()]
    for where, measured in (("within", topology.measured_within), ("between", topology.measured_between)):
        for op, by_size in measured.items():
            lines.append(f"\n[measured_{where}.{op}]")
            for n, points in by_size.items():
                pairs = ", ".join(f"[{a:.0f}, {b:.3e}]" for a, b in points)
                lines.append(f"{n} = [{pairs}]")
    return "\n".join(lines) + "\n"
