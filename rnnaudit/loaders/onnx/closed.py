"""Traced steps that are exactly known cells become those cells, with all that is proved of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import onnx_ir as ir

from rnnaudit.cells.recognise import Part, recognise
from rnnaudit.loaders.onnx.axes import Atom, Layout, axis
from rnnaudit.loaders.onnx.nodes import Read
from rnnaudit.model import Layer, TracedCell
from rnnaudit.results import Finding

_CALLED = {"lstm": "an LSTM", "gru": "a GRU", "elman": "an Elman cell"}


def closed(read: Read) -> list[Read]:
    """Return a read for each cell that a traced step is made of; the read itself where unknown.

    Cells of one step that feed one another make one stack.
    """
    (recurrence,) = read.layer.recurrences
    cell = recurrence.cell
    parts = recognise(cell) if isinstance(cell, TracedCell) else None
    if parts is None or not isinstance(cell, TracedCell):
        return [read]
    if any(part.reads != (i - 1 if i else None) for i, part in enumerate(parts)):
        return [read]  # cells side by side are no stack
    ports = _ports(cell, parts)
    if read.y is not None and ports[:1] != (0,):
        return [read]  # what the loop gives is not the cell's output
    reads: list[Read] = []
    for i, part in enumerate(parts):
        units = axis(Atom(f"{recurrence.name}:units of {i}", part.cell.hidden_size))
        last = i == len(parts) - 1
        found = replace(
            read,
            layer=_layer(read, part, ports),
            y=read.y if last else ir.Value(name=f"{recurrence.name}:h of {i}"),
            features=read.features if last and read.y is not None else units,
        )
        if i:
            before = reads[-1]
            assert before.y is not None
            x = Layout(before.y, (read.time, read.batch, before.features))
            found = replace(found, x=x, findings=())
        reads.append(found)
    first, *others = reads[0].findings
    return [replace(reads[0], findings=(_told(first, parts), *others)), *reads[1:]]


def _layer(read: Read, part: Part, ports: tuple[int, ...]) -> Layer:
    (recurrence,), site = read.layer.recurrences, read.layer.site
    start = replace(recurrence.initial, value=recurrence.initial.value[list(part.state)])
    if site is not None and site.outlets is not None:
        finals = tuple(site.outlets.finals[i] for i in ports)
        obstacle = site.outlets.obstacle or ("" if ports else "its state is packed into one value")
        site = replace(site, outlets=replace(site.outlets, finals=finals, obstacle=obstacle))
    return Layer((replace(recurrence, cell=part.cell, initial=start),), site)


def _ports(cell: TracedCell, parts: tuple[Part, ...]) -> tuple[int, ...]:
    """Return which of the step's states are the parts of the only cell's; empty if none are."""
    ends = list(accumulate(port.size for port in cell.states))
    spans = [tuple(range(end - p.size, end)) for end, p in zip(ends, cell.states, strict=True)]
    H = parts[0].cell.hidden_size
    halves = [half for half in (parts[0].state[:H], parts[0].state[H:]) if half]
    if len(parts) > 1 or any(half not in spans for half in halves):
        return ()
    return tuple(spans.index(half) for half in halves)


def _told(note: Finding, parts: tuple[Part, ...]) -> Finding:
    kinds = ", which feeds ".join(_CALLED[part.cell.kind] for part in parts)
    sums = ", its biases summed in float64" if any(part.rounded for part in parts) else ""
    return replace(note, message=f"{note.message}; its operators are exactly {kinds}{sums}")
