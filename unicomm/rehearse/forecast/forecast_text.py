"""A forecast as text."""

from __future__ import annotations

from collections.abc import Sequence

from unicomm.flight_recorder.texts import span

from .forecast import Forecast

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def size_text(count: float) -> str:
    """Returns a number of bytes with its unit."""
    for factor, unit in _UNITS:
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def render(forecast: Forecast) -> str:
    """Returns the forecast as lines of text."""
    one, several = forecast, forecast.steps != 1
    lines = [
        f"forecast for {one.ranks} ranks on {one.topology}"
        f" (median of {one.steps} step{'s' * several}; {_share(one.exposed, one.step)} of it is waiting)",
        f"  step {_time(one.step)}: {_time(one.compute)} computing, {_time(one.exposed)} waiting;"
        f" {_time(one.hidden)} of communication hidden behind computing",
        f"  at most {size_text(one.peak_bytes)} in unfinished operations of a rank",
        "  a rank in a step:",
    ]
    lines += [
        f"    {each.operations:7.1f} operations, {size_text(each.bytes):>8}, {_time(each.seconds):>8}"
        f"  in {each.groups} of {each.size}"
        for each in one.traffic
    ]
    return "\n".join(lines)


def comparison(forecasts: Sequence[tuple[str, Forecast | None]]) -> str:
    """Returns forecasts beside each other, a line each. The others are compared with the first one."""
    base, wide = forecasts[0][1], max(len(name) for name, _ in forecasts)
    lines = ["what if:"]
    for name, one in forecasts:
        if one is None or base is None:
            lines.append(f"  {name:{wide}}  no forecast: its operations do not fit together")
            continue
        sent = size_text(sum(each.bytes for each in one.traffic))
        times = f"step {_time(one.step):>8} ({one.step / base.step:4.0%}), {_time(one.exposed):>8} waiting"
        lines.append(f"  {name:{wide}}  {one.ranks:5} ranks: {times}, {sent:>8} a rank")
    return "\n".join(lines)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"


def _time(seconds: float) -> str:
    return span(int(seconds * 1e9))
