"""What a reader copies: a command for a POSIX shell, three lines of Python that run a file.

Lines that are too long are broken where the shell, or Python, reads on.
"""

from __future__ import annotations

import keyword
import shlex
from collections.abc import Callable, Sequence
from itertools import pairwise

from rich.cells import cell_len

from rnnaudit.results import Export

_NUMPY = {"float": "float32", "double": "float64", "bool": "bool_"}
_NAMED = 4  # more outputs than this get no names of their own
_STEPS = 100  # of the sequence that the snippet runs


def shell(command: Sequence[str], room: int) -> list[str]:
    """Quote a command and break it into lines that a POSIX shell reads as one.

    An option stays on one line with its value where both fit.
    """
    lines: list[str] = []
    for word, following in pairwise([*command, ""]):
        *full, last = _split(word, shlex.quote, room - 2)
        ahead = cell_len(last)
        if word.startswith("--") and following:
            ahead += 1 + cell_len(shlex.quote(following))
        if lines and not full and cell_len(lines[-1]) + 1 + ahead <= room - 2:
            lines[-1] += f" {last}"
            continue
        if lines:
            lines[-1] += " \\"
        lines += [f"{part}\\" for part in full] + [last]
    return lines


def snippet(export: Export, room: int) -> list[str]:
    """Write three lines of Python that run the written file on zeros.

    Long names are split over more lines, which Python reads as one.
    """
    inside = room - 5  # an indent and a comma
    feeds = [_feed(name, _zeros(shape, dtype), inside) for name, shape, dtype in export.inputs]
    outputs = _variables(export.outputs, inside)
    left = ", ".join(outputs) + ("," if len(outputs) == 1 else "")
    left = left if len(outputs) <= _NAMED else "outputs"
    return [
        "import numpy as np, onnxruntime as ort",
        *_call(
            "session = ort.InferenceSession(", [_split(export.path, _quoted, inside)], ")", room
        ),
        *_call(f"{left} = session.run(None, {{", feeds, "})", room),
    ]


def _variables(names: Sequence[str], room: int) -> list[str]:
    """Name variables after the outputs, where each is a short name that Python has free."""
    taken = {"np", "ort", "session", *keyword.kwlist}
    free = all(name.isascii() and name.isidentifier() and name not in taken for name in names)
    if free and len(set(names)) == len(names) and sum(map(len, names)) <= room // 2:
        return list(names)
    return [f"y{i or ''}" for i in range(len(names))]


def _feed(name: str, zeros: str, room: int) -> list[str]:
    *parts, last = _split(name, _quoted, room - len(zeros) - 2)
    return [*parts, f"{last}: {zeros}"]


def _quoted(text: str) -> str:
    simple = text.isprintable() and '"' not in text and "\\" not in text
    return f'"{text}"' if simple else ascii(text)


def _call(opening: str, arguments: Sequence[Sequence[str]], closing: str, room: int) -> list[str]:
    """Set a call on one line where it fits, else each argument on its own lines."""
    line = f"{opening}{', '.join(' '.join(parts) for parts in arguments)}{closing}"
    if cell_len(line) <= room:
        return [line]
    lines = [part for parts in arguments for part in [*parts[:-1], f"{parts[-1]},"]]
    return [opening, *(f"    {part}" for part in lines), closing]


def _zeros(shape: Sequence[int | str], dtype: str) -> str:
    sizes = [s if isinstance(s, int) else _example(s) for s in shape]
    inside = ", ".join(map(str, sizes)) + ("," if len(sizes) == 1 else "")
    return f"np.zeros(({inside}), np.{_NUMPY.get(dtype, dtype)})"


def _example(symbol: str) -> int:
    if symbol.startswith("steps_past"):
        return 0  # the buffer of a streaming model before its first call
    return 1 if symbol.lower() in ("n", "b", "bs") or "batch" in symbol.lower() else _STEPS


def _split(word: str, quote: Callable[[str], str], room: int) -> list[str]:
    """Quote a word in as many parts as ``room`` asks for; side by side they are the word."""
    parts, rest = [], word
    while cell_len(quote(rest)) > room and len(rest) > 1:
        cut = next((i for i in range(len(rest) - 1, 1, -1) if cell_len(quote(rest[:i])) <= room), 1)
        parts.append(quote(rest[:cut]))
        rest = rest[cut:]
    return [*parts, quote(rest)]
