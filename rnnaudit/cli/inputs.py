"""What the options about inputs stand for; numpy is imported only where they are used."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rnnaudit.data import Data


def sequences(spec: str | None, *, time_axis: int | None, batch_axis: int | None) -> Data | None:
    """Read ``--data``; None without it.

    Raises:
        LoadError: The data cannot be used.
        UsageError: An axis does not exist.
    """
    if spec is None:
        return None
    from rnnaudit.data import load_data

    return load_data(spec, time_axis=time_axis, batch_axis=batch_axis)


def bounds(text: str | None) -> tuple[float, float] | None:
    """Read ``--input-range``; None without it.

    Raises:
        UsageError: Not two finite numbers LO:HI.
    """
    if text is None:
        return None
    from rnnaudit.data import parse_range

    return parse_range(text)
