"""What is off about the network between hosts, and the output of `unicomm doctor --network`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from unicomm.backends.bootstrap.addresses import is_loopback
from unicomm.comms.errors import CommError
from unicomm.comms.membership.environment import detect_environment
from unicomm.flight_recorder.texts import printable

from .findings import Finding
from .network import Pair, Place, Way, look, measure

# A pair of hosts is remarkable when it is so much worse than what it is compared with.
_SLOWER = 3.0  # round trip, beside the median of all pairs
_LEAST_TRIP = 200e-6  # seconds; differences below this do not matter
_SPIKES = 20.0  # the slowest messages, beside the pair's median
_LEAST_SPIKE = 5e-3  # seconds
_PART_OF_SPEED = 0.6  # of what the interfaces can carry
_LESS = 0.5  # of the median of all pairs, or of the other direction
_RESENT = 0.001  # of the packets
_SHOWN = 3  # findings of one kind, and names in one
_WIDTH = 110  # of the tables, at least


def run(hosts: Sequence[str], as_json: bool) -> int:
    """Measures, and prints what was found. Within a job without `hosts` all ranks call it, and rank 0 prints.

    Returns exit code 0 if nothing is off, 1 if something is, and 2 if the job cannot be measured.
    """
    console = Console()
    console.width = max(console.width, _WIDTH)
    if hosts:
        ways = look(hosts)
        found = list(of_ways(ways))
        _print(console, as_json, {"ways": [asdict(way) for way in ways]}, found, _table_of_ways(ways))
        return _exit_code(found)
    try:
        measured = measure(env := detect_environment())
    except CommError as error:
        console.print(Text(printable(f"unicomm doctor: {error}"), "red"))
        return 2
    if measured is None or env.rank != 0:
        return 0
    places, pairs = measured
    found = list(of_pairs(places, pairs))
    data = {"hosts": [asdict(place) for place in places], "pairs": [asdict(pair) for pair in pairs]}
    _print(console, as_json, data, found, _table_of_places(places), _table_of_pairs(places, pairs))
    return _exit_code(found)


def _exit_code(found: Sequence[Finding]) -> int:
    return 1 if any(finding.ok is False for finding in found) else 0


# --- findings ---------------------------------------------------------------------------------------------


def of_pairs(places: Sequence[Place], pairs: Sequence[Pair]) -> Iterator[Finding]:
    """Yields what is off about the hosts of a job and the network between them."""
    names = names_of(places)
    for name, place in zip(names, places, strict=True):
        if not place.address:
            cure = "connect the host, or name the interface by UNICOMM_INTERFACE"
            yield Finding(name, False, "only loopback leads from here to the job's store", cure)
    own = [
        name
        for name, place in zip(names, places, strict=True)
        if place.own_name and is_loopback(place.own_name)
    ]
    if own:
        cure = "unicomm goes by the route; programs on torch's own Gloo may need GLOO_SOCKET_IFNAME"
        yield Finding(_some(own), None, "the host's own name means its loopback there", cure)
    mtus = {place.mtu for place in places if place.mtu}
    if len(mtus) > 1:
        sizes = ", ".join(f"{name} {place.mtu}" for name, place in zip(names, places, strict=True))
        yield Finding("MTU", False, f"it differs between hosts: {sizes}", "set the same on all interfaces")
    paced = [name for name, place in zip(names, places, strict=True) if place.congestion.startswith("bbr")]
    if paced:
        detail = "TCP's congestion control is bbr, which sends at a rate that it estimates"
        cure = "within one data centre compare cubic: `sysctl net.ipv4.tcp_congestion_control=cubic`"
        yield Finding(_some(paced), None, detail, cure)
    for pair in pairs:
        if pair.trouble:
            cure = "open the ports between the hosts for all programs of the job: they choose ports freely"
            yield Finding(_name(names, pair), False, f"not connected: {pair.trouble}", cure)
    reached = [pair for pair in pairs if not pair.trouble]
    for pair in reached:
        yield from _of_pair(_name(names, pair), places, pair, reached)


def _of_pair(name: str, places: Sequence[Place], pair: Pair, all_pairs: Sequence[Pair]) -> Iterator[Finding]:
    trip = statistics.median(p.round_trip for p in all_pairs)
    if pair.round_trip > max(_SLOWER * trip, _LEAST_TRIP) and len(all_pairs) > 2:
        detail = f"round trip {_time(pair.round_trip)}, where the median of all pairs is {_time(trip)}"
        yield Finding(name, False, detail, "see whether the hosts are in one room, and what the way is")
    if pair.slowest > max(_SPIKES * pair.round_trip, _LEAST_SPIKE):
        detail = f"one message of 100 takes {_time(pair.slowest)}, half of them {_time(pair.round_trip)}"
        yield Finding(
            name, False, detail, "see what else uses the network, and whether the hosts' cores are busy"
        )
    if pair.resent > _RESENT:
        detail = f"{pair.resent:.2%} of the packets had to be sent again"
        yield Finding(name, False, detail, "look for errors of cables, ports and switches: `ip -s link`")
    slower, faster = sorted((pair.there, pair.back))
    if slower < _LESS * faster:
        detail = f"{_rate(pair.there)} one way, {_rate(pair.back)} the other"
        yield Finding(name, False, detail, "compare the interfaces' settings: `ethtool INTERFACE`")
    speeds = [s for s in (places[pair.one].gigabits, places[pair.other].gigabits) if s]
    usual = statistics.median(min(p.there, p.back) for p in all_pairs)
    if speeds and slower < _PART_OF_SPEED * 1e9 * min(speeds):
        detail = f"{_rate(slower)} over interfaces of {min(speeds):g} Gbit/s"
        yield Finding(
            name, False, detail, "one TCP connection may not fill a fast link; see what else uses it"
        )
    elif slower < _LESS * usual and len(all_pairs) > 2:
        yield Finding(name, False, f"{_rate(slower)}, where the median of all pairs is {_rate(usual)}")
    interfaces = [places[pair.one].mtu, places[pair.other].mtu]
    if all(interfaces) and 0 < pair.path_mtu < min(interfaces):
        detail = f"the path carries {pair.path_mtu} bytes, the interfaces {min(interfaces)}"
        yield Finding(name, False, detail, "allow large frames on all switches between, or nowhere")


def of_ways(ways: Sequence[Way]) -> Iterator[Finding]:
    """Yields what is off about the ways to hosts."""
    for way in ways:
        if way.error:
            cure = "see /etc/hosts and the name service, and `ip route`; or name the host by its address"
            yield Finding(way.host, False, way.error, cure)
        elif way.round_trip is None:
            cure = "see whether the host is up, and whether a firewall drops packets on the way"
            yield Finding(way.host, False, f"{way.address}: {way.answer}", cure)


def names_of(places: Sequence[Place]) -> list[str]:
    """Returns the hosts' names, with addresses where several hosts have one name."""
    names = [place.hostname for place in places]
    return [f"{p.hostname} ({p.address})" if names.count(p.hostname) > 1 else p.hostname for p in places]


def _name(names: Sequence[str], pair: Pair) -> str:
    return f"{names[pair.one]} - {names[pair.other]}"


def _some(names: Sequence[str]) -> str:
    """Returns the first names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


# --- output -----------------------------------------------------------------------------------------------


def _print(
    console: Console, as_json: bool, data: Mapping[str, object], found: list[Finding], *tables: Table
) -> None:
    if as_json:
        print(
            json.dumps(
                {"ok": not _exit_code(found), **data, "findings": [asdict(f) for f in found]}, indent=2
            )
        )
        return
    for table in tables:
        console.print(table)
    by_cure: dict[str, list[Finding]] = {}
    for finding in found:
        by_cure.setdefault(finding.cure, []).append(finding)
    for cure, alike in by_cure.items():
        for finding in alike[:_SHOWN]:
            mark = Text("-  ", "dim") if finding.ok is None else Text("no ", "red")
            console.print(
                mark.append(printable(finding.what), "bold").append(f"  {printable(finding.detail)}")
            )
        if len(alike) > _SHOWN:
            console.print(f"   and {len(alike) - _SHOWN} more like these")
        if cure:
            console.print(Text(f"   -> {cure}", "yellow"))
    if not _exit_code(found):
        console.print(Text("ok nothing is off.", "green"))


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def _table_of_places(places: Sequence[Place]) -> Table:
    table = _table("host", "address", "interface", "MTU", "speed", "TCP")
    for name, place in zip(names_of(places), places, strict=True):
        speed = f"{place.gigabits:g} Gbit/s" if place.gigabits else "unknown"
        row = (name, place.address or "none", place.interface or "-", str(place.mtu or "-"), speed)
        table.add_row(*map(printable, (*row, place.congestion or "-")))
    return table


def _table_of_pairs(places: Sequence[Place], pairs: Sequence[Pair]) -> Table:
    table = _table("hosts", "round trip", "99 % below", "there", "back", "path MTU", "sent again")
    for pair in pairs:
        cells = ["-"] * 6
        if not pair.trouble:
            rates = (_rate(pair.there), _rate(pair.back))
            rest = (str(pair.path_mtu), f"{pair.resent:.2%}")
            cells = [_time(pair.round_trip), _time(pair.slowest), *rates, *rest]
        table.add_row(printable(_name(names_of(places), pair)), *cells)
    return table


def _table_of_ways(ways: Sequence[Way]) -> Table:
    table = _table("host", "address", "from", "interface", "MTU", "round trip", "answer")
    for way in ways:
        trip = "-" if way.round_trip is None else _time(way.round_trip)
        cells = (way.host, way.address, way.source, way.interface, str(way.mtu or ""), trip, way.answer)
        table.add_row(*(printable(cell) or "-" for cell in cells))
    return table


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} us" if seconds < 1e-3 else f"{1e3 * seconds:.1f} ms"


def _rate(bits: float) -> str:
    return f"{bits / 1e9:.2f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"
