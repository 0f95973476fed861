"""Numbers and names as people read them; a bound is rounded to the side on which it stays true.

``up`` never prints less than the value and ``down`` never more: both round the exact
binary value in decimal arithmetic.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Decimal

DIGITS = 3
_ENOUGH_DIGITS = 17  # tell any two float64 apart

NONE = "—"
"""Stands where there is no number."""


def up(value: float, digits: int = DIGITS) -> str:
    """Print ``value`` with ``digits`` significant digits, rounded towards +∞."""
    return _rounded(Decimal(value), digits, ROUND_CEILING)


def down(value: float, digits: int = DIGITS) -> str:
    """Print ``value`` with ``digits`` significant digits, rounded towards −∞."""
    return _rounded(Decimal(value), digits, ROUND_FLOOR)


def near(value: float, digits: int = DIGITS) -> str:
    """Print an estimate with ``digits`` significant digits, rounded to the nearest."""
    return _rounded(Decimal(value), digits, ROUND_HALF_EVEN)


def rate_up(value: float) -> str:
    """Print an upper bound on λ ≥ 0, with digits enough to stay below 1 where it is."""
    return _beside_one(value, up)


def rate_down(value: float) -> str:
    """Print a lower bound on λ ≥ 0, with digits enough to stay above 1 where it is."""
    return _beside_one(value, down)


def percent_up(probability: float) -> str:
    """Print a probability as a percentage, rounded up to two digits."""
    return f"{_rounded(Decimal(probability) * 100, 2, ROUND_CEILING)}\u00a0%"


def percent(share: float) -> str:
    """Print a chosen share, e.g. a confidence of 0.95 as ``95 %``."""
    return f"{(Decimal(repr(share)) * 100).normalize():f}\u00a0%"


def epsilon(value: float) -> str:
    """Print a ε exactly and compactly: ``1e-3``, ``2.5e-4``, ``2``."""
    exact = Decimal(repr(float(value))).normalize()
    if exact == 0:
        return "0"
    return f"{exact:f}" if exact >= 1 and exact.adjusted() < DIGITS else _scientific(exact)


def exact(value: float) -> str:
    """Print a value with all its digits: the shortest that read back as the same float64."""
    digits = Decimal(repr(float(value))).normalize()
    if not digits.is_finite():
        return "not finite"
    return f"{digits:f}" if _in_sight(digits) else _scientific(digits)


def estimate(value: float, stderr: float) -> str:
    """Print an estimate and its standard error to the same decimal: ``−0.224 ± 0.004``."""
    if not (math.isfinite(stderr) and stderr > 0):
        return minus(near(value))
    error = Decimal(repr(stderr))
    unit = Decimal(1).scaleb(error.adjusted())
    error = error.quantize(unit, ROUND_CEILING)
    if error.adjusted() < -2 * DIGITS:
        return minus(f"{near(value)} ± {near(stderr, 1)}")
    places = min(unit, Decimal(1))
    return minus(f"{Decimal(value).quantize(places):f} ± {error:f}")


def minus(text: str) -> str:
    """Replace a leading hyphen by a minus sign, for print only."""
    return f"−{text[1:]}" if text.startswith("-") else text


def seconds(value: float, unit_of: float | None = None) -> str:
    """Print a time span in its natural unit, or in that of another span."""
    measure = value if unit_of is None else unit_of
    for unit, length in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if measure >= length:
            return f"{_short(value / length)} {unit}"
    return f"{_short(value * 1e6)} µs"


def size(count: int) -> str:
    """Print a number of bytes with a decimal prefix."""
    for unit, length in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= length:
            return f"{_short(count / length)} {unit}"
    return f"{count} B"


def whole(number: int | None) -> str:
    """Print a whole number, or a dash where there is none."""
    return NONE if number is None else str(number)


def counted(count: int, noun: str) -> str:
    """Print a count with its noun: ``1 recurrence``, ``2 recurrences``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def clean(text: str) -> str:
    """Make a name from a file safe to print: one line, and nothing that steers a terminal."""
    return "".join("�" if _steers(c) else c for c in " ".join(text.split()))


def printable(text: str) -> bool:
    """Whether a name can be printed as it is, so that it can be copied."""
    return not any(_steers(c) or (c.isspace() and c != " ") for c in text)


def _steers(letter: str) -> bool:
    return unicodedata.category(letter) in ("Cc", "Cf", "Cs")


def _beside_one(value: float, rounded: Callable[[float, int], str]) -> str:
    text = ""
    for digits in range(DIGITS, _ENOUGH_DIGITS + 1):
        text = rounded(value, digits)
        if (float(text) < 1) == (value < 1) and (float(text) > 1) == (value > 1):
            break
    return text


def _rounded(exact: Decimal, digits: int, rounding: str) -> str:
    if not exact.is_finite():
        return "not finite"
    if exact == 0:
        return "0"
    result = exact.quantize(Decimal(1).scaleb(exact.adjusted() - digits + 1), rounding)
    if result.adjusted() > exact.adjusted():  # 9.996 became 10.00
        result = result.quantize(Decimal(1).scaleb(result.adjusted() - digits + 1))
    return f"{result:f}" if _in_sight(result) else _scientific(result)


def _in_sight(value: Decimal) -> bool:
    """Whether a number reads better without an exponent."""
    return value == 0 or -DIGITS < value.adjusted() <= DIGITS


def _short(value: float) -> str:
    text = near(value)
    return text.rstrip("0").rstrip(".") if "." in text else text


def _scientific(value: Decimal) -> str:
    mantissa = value.scaleb(-value.adjusted()).normalize()
    return f"{mantissa:f}e{value.adjusted()}"
