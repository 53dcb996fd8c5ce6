"""Figures as people read them, units on the same line. What was not measured is a dash."""

from __future__ import annotations

from typing import Any

from patchkv_agents.estimates import Interval

NONE = "–"
MINUS = "−"
SPACE = "\N{NO-BREAK SPACE}"


def duration(ms: float | None) -> str:
    """Milliseconds below a second, seconds from there on."""
    if ms is None:
        return NONE
    if round(ms) >= 1000:
        return f"{ms / 1000:.2f}{SPACE}s"
    digits = 0 if ms >= 10 else 1 if ms >= 1 else 2
    return f"{ms:.{digits}f}{SPACE}ms"


def percent(share: float | None, digits: int = 1) -> str:
    """A share between 0 and 1."""
    return NONE if share is None else f"{100 * share:.{digits}f}{SPACE}%"


def points(share: float | None) -> str:
    """A share between 0 and 1 as points of 100."""
    return NONE if share is None else f"{100 * share:.1f}"


def kl(nats: float | None) -> str:
    """A divergence: four decimals, or a power of ten where these would be zero."""
    if nats is None:
        return NONE
    if nats == 0:
        return "0"
    return f"{nats:.4f}" if abs(nats) >= 1e-3 else f"{nats:.1e}"


def times(ratio: float | None) -> str:
    """A speed-up."""
    return NONE if ratio is None else f"{ratio:.2f}{SPACE}×"


def signed(number: float) -> str:
    """With its sign, one decimal."""
    return f"{number:+.1f}".replace("-", MINUS)


def times_interval(interval: Interval | None) -> str:
    """A ratio with its interval."""
    if interval is None:
        return NONE
    return f"{times(interval.estimate)} [{interval.low:.2f}, {interval.high:.2f}]"


def signed_interval(interval: Interval | None) -> str:
    """A difference with its interval."""
    if interval is None:
        return NONE
    low, high = signed(interval.low), signed(interval.high)
    return f"{signed(interval.estimate)} [{low}, {high}]"


def percent_interval(interval: Interval | None) -> str:
    """A share between 0 and 1 with its interval."""
    if interval is None:
        return NONE
    return f"{percent(interval.estimate)} [{100 * interval.low:.0f}, {100 * interval.high:.0f}]"


def kl_interval(interval: Interval | None) -> str:
    """A divergence with its interval."""
    if interval is None:
        return NONE
    return f"{kl(interval.estimate)} [{kl(interval.low)}, {kl(interval.high)}]"


def points_interval(entry: dict[str, Any] | None) -> str:
    """An entry of `summary.json` between 0 and 1 as points: mean and its interval."""
    if entry is None:
        return NONE
    low, high = entry["ci"]
    return f"{points(entry['mean'])} [{100 * low:.0f}, {100 * high:.0f}]"


def short(text: str, length: int = 160) -> str:
    """The text in one line, cut where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "…"
