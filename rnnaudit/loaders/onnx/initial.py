"""The state that a traced recurrence starts from, part by part."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import torch

from rnnaudit.findings import finding
from rnnaudit.loaders.interface import listed
from rnnaudit.loaders.onnx.contents import Spread
from rnnaudit.loaders.onnx.reading import Array
from rnnaudit.loaders.onnx.wiring import Wiring
from rnnaudit.model import InitialState
from rnnaudit.results import Finding

Start = tuple[ir.Value | None, tuple[int, ...]]


def initial_state(
    starts: Sequence[Start], wiring: Wiring, where: str
) -> tuple[InitialState, list[Finding]]:
    """Join the parts' starts; zero is assumed for what only the caller or the graph knows.

    Args:
        starts: For each part its first value and its shape for one sequence.
        wiring: What values are made of.
        where: The recurrence, for findings.
    """
    parts, sources, names = [], [], []
    findings: list[Finding] = []
    for value, shape in starts:
        stored = None if value is None else _stored(wiring.known.content(value), shape)
        parts.append(np.zeros(shape) if stored is None else stored)
        if value is None or stored is not None:
            sources.append("constant" if parts[-1].any() else "zero")
            continue
        roots = wiring.roots(value)
        if all(root.producer() is None for root in roots):
            sources.append("graph input")
            names += [root.name or "" for root in roots]
            continue
        sources.append("computed")
        makers = sorted({_maker(root) for root in roots})
        findings.append(
            finding(
                "RA115",
                where,
                f"{value.name} computed inside the model (from {listed(makers)}); zero is assumed",
            )
        )
    order = ("computed", "graph input", "constant", "zero")
    source = next(s for s in order if s in sources)
    flat = np.concatenate([part.reshape(-1) for part in parts])
    named = ", ".join(dict.fromkeys(names)) if source == "graph input" else ""
    state = InitialState(torch.from_numpy(flat), source, named or None)  # type: ignore[arg-type]
    return state, findings


def _stored(content: Array | Spread | None, shape: tuple[int, ...]) -> Array | None:
    """Return what is stored for one sequence; None where nothing is, or rows differ."""
    core = content.core if isinstance(content, Spread) else content
    if core is None or core.dtype.kind == "O":
        return None
    exact = core.astype(np.float64)
    if exact.ndim > len(shape) and (exact == exact[:1]).all():
        exact = exact[0]  # an axis for sequences that the body never sees
    if exact.ndim == len(shape) and exact.ndim and (exact == exact[:1]).all():
        exact = exact[:1] if shape[0] == 1 else exact
    try:
        return np.broadcast_to(exact, shape).copy()
    except ValueError:
        return None


def _maker(value: ir.Value) -> str:
    producer = value.producer()
    if producer is None:
        return value.name or "an input"
    return f"{producer.op_type} {producer.name or value.name!r}"
