"""One LSTM, GRU or RNN node to the cells it holds, every attribute honoured or refused by name.

ONNX stacks an LSTM's gates as i, o, f, c and a GRU's as z, r, h; ours are i, f, g, o and
r, z, n. B holds the input biases, then the recurrent ones: an LSTM and an RNN only ever
see their sum, a GRU keeps them apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from rnnaudit.errors import LoadError
from rnnaudit.findings import finding
from rnnaudit.loaders.interface import ROUNDED, listed
from rnnaudit.loaders.onnx.activations import Resolved, resolve
from rnnaudit.loaders.onnx.axes import Atom, Axis, Layout, axis, length
from rnnaudit.loaders.onnx.contents import Spread
from rnnaudit.loaders.onnx.reading import Array
from rnnaudit.loaders.onnx.refusal import Refused
from rnnaudit.loaders.onnx.shapes import fixed_length
from rnnaudit.loaders.onnx.values import Knowledge
from rnnaudit.loaders.onnx.wiring import Wiring
from rnnaudit.model import (
    Activation,
    Cell,
    ElmanCell,
    GRUCell,
    InitialState,
    Layer,
    LSTMCell,
    Recurrence,
    Site,
)
from rnnaudit.results import Finding

T = TypeVar("T")
Default = TypeVar("Default")

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
QUANTISED = "DynamicQuantizeLSTM"
"""Microsoft's LSTM of 8-bit weights, stored with inputs before gates: W [D, I, 4H]."""

_ORDER = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
_INPUTS = {
    "LSTM": ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P"),
    "GRU": ("X", "W", "R", "B", "sequence_lens", "initial_h"),
    "RNN": ("X", "W", "R", "B", "sequence_lens", "initial_h"),
}
_ATTRIBUTES = frozenset(
    {"activation_alpha", "activation_beta", "activations", "clip", "direction", "hidden_size"}
)
_OWN_ATTRIBUTES = {
    "LSTM": frozenset({"input_forget", "layout"}),
    "GRU": frozenset({"linear_before_reset", "layout"}),
    "RNN": frozenset({"layout"}),
}
_SCALES = ("W_scale", "W_zero_point", "R_scale", "R_zero_point")
_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """A node that was read: its layer (index 0 for now), and what its values look like.

    ``time`` and ``batch`` are the axes of X, ``features`` that of Y (directions × units).
    ``finals`` hold the last step of Y again.
    """

    layer: Layer
    node: ir.Node
    x: Layout
    y: ir.Value | None
    time: Axis
    batch: Axis
    features: Axis
    dtype: str
    findings: tuple[Finding, ...]
    finals: frozenset[ir.Value] = frozenset()


@dataclass(slots=True)
class _Reader:
    """The parts of one node, named as the operator's text names them."""

    node: ir.Node
    wiring: Wiring
    name: str
    findings: list[Finding] = field(default_factory=list)

    @property
    def op(self) -> str:
        return "LSTM" if self.quantised else self.node.op_type

    @property
    def quantised(self) -> bool:
        return self.node.op_type == QUANTISED

    @property
    def known(self) -> Knowledge:
        return self.wiring.known

    def input(self, name: str) -> ir.Value | None:
        names = (*_INPUTS[self.op], *(_SCALES if self.quantised else ()))
        index = names.index(name) if name in names else len(self.node.inputs)
        return self.node.inputs[index] if index < len(self.node.inputs) else None

    def note(self, id_: str, message: str) -> None:
        self.findings.append(finding(id_, self.name, message))

    def weight(self, name: str) -> Array | None:
        """Return a weight's values in float64, or None where the node has no such input."""
        value = self.input(name)
        if value is None:
            return None
        stored = self.known.constant(value)
        if stored is None:
            raise Refused(_not_constant(name, value))
        if self.quantised and name in {"W", "R"}:
            return self._dequantised(name, stored)
        if stored.dtype.kind not in "fV" and stored.dtype.name not in {"bfloat16"}:
            raise Refused(f"{name} ({value.name!r}) must hold floats, got {stored.dtype.name}")
        with np.errstate(invalid="ignore"):  # a signalling NaN warns, and is refused below
            exact = stored.astype(np.float64)
        if not np.isfinite(exact).all():
            raise LoadError(
                f"weights must be finite, and {name} ({value.name!r}) of {self.op} node "
                f"{self.name!r} holds NaN or infinity",
                help="take an earlier checkpoint",
                id="RA104",
            )
        return exact

    def _dequantised(self, name: str, stored: Array) -> Array:
        """Return scale · (q − zero), turned to ONNX's [D, 4H, ·]; scales are [D] or [D, 4H]."""
        if stored.dtype.kind not in "iu" or stored.ndim != 3:
            raise Refused(f"{name} must hold 8-bit integers on three axes, got {stored.dtype.name}")
        D, _, columns = stored.shape
        parts = []
        for suffix in ("scale", "zero_point"):
            known = self.known.constant(self.input(f"{name}_{suffix}"))
            if known is None or known.shape not in {(D,), (D, columns), (1,)}:
                raise Refused(f"{name}_{suffix} must be stored, one for each direction or column")
            parts.append(known.astype(np.float64).reshape(len(known), 1, -1))
        scale, zero = parts
        exact = (stored.astype(np.float64) - zero) * scale
        if not np.isfinite(exact).all():
            raise Refused(f"{name}_scale must hold finite numbers")
        return exact.transpose(0, 2, 1)

    def shaped(self, name: str, shape: tuple[int, ...]) -> Array | None:
        found = self.weight(name)
        if found is not None and found.shape != shape:
            raise Refused(f"{name} must have shape {shape}, got {found.shape}")
        return found


def _not_constant(name: str, value: ir.Value) -> str:
    producer = value.producer()
    if _undefined(value):
        return f"weights {name} ({value.name!r}) are defined nowhere in the file"
    if producer is None:
        return (
            f"weights {name} are the graph input {value.name!r}: their values are not in the file; "
            "give them with --weights FILE, or store them as an initializer"
        )
    return (
        f"weights {name} ({value.name!r}) are computed by {producer.op_type}, "
        "not stored; fold constants first"
    )


def read(node: ir.Node, wiring: Wiring, name: str, scope: str, opset: int) -> Read:
    """Read a node of opset 7 or later.

    Args:
        node: The LSTM, GRU or RNN node.
        wiring: What every value before it is, and what it is made of.
        name: What to call the recurrence; unique in the file.
        scope: The path of the If branch it sits in, empty at the top.
        opset: The opset that the model imports.

    Raises:
        Refused: Something that is not read; the message names it.
        LoadError: A weight holds NaN or infinity, or does not fit its declared shape.
    """
    if opset < 7:
        raise Refused(f"{node.op_type} of opset {opset} is not read, only 7 and later")
    reader = _Reader(node, wiring, name)
    for attribute in node.attributes.values():
        if attribute.name not in _ATTRIBUTES | _OWN_ATTRIBUTES[reader.op]:
            raise Refused(f"attribute {attribute.name!r} is not one that {node.op_type} has")
        if attribute.is_ref():
            raise Refused(f"attribute {attribute.name!r} is a function's parameter")
    direction = _text(node, "direction", "forward")
    if direction not in _DIRECTIONS:
        raise Refused(f"direction must be one of {', '.join(_DIRECTIONS)}, got {direction!r}")
    reversed_ = _DIRECTIONS[direction]
    weights = _weights(reader, len(reversed_))
    clip = _clip(reader)
    functions = _functions(reader, len(reversed_))
    layout = _number(node, "layout", 0)
    if layout not in {0, 1}:
        raise Refused(f"layout must be 0 or 1, got {layout}")
    if layout == 1:
        reader.note("RA112", "layout = 1 (batch first): ONNX Runtime refuses to run such a node")
    if reader.input("sequence_lens") is not None:
        _lengths(reader)
    if reader.quantised:
        reader.note("RA127", ROUNDED)
    states = _states(reader, len(reversed_), weights.R.shape[2], layout)
    cells = [_cell(reader, weights, d, functions[d], clip) for d in range(len(reversed_))]
    layer = Layer(
        tuple(
            Recurrence(name, 0, cell, state, reverse, ROUNDED if reader.quantised else "")
            for cell, state, reverse in zip(cells, states, reversed_, strict=True)
        ),
        Site(
            node=node.name or name,
            x=_name_of(reader.input("X")),
            layout=layout,
            sequence_lens=_name_or_none(reader.input("sequence_lens")),
            scope=scope,
        ),
    )
    return _placed(reader, layer, layout)


def _placed(reader: _Reader, layer: Layer, layout: int) -> Read:
    """Track the axes of the node's outputs, made of those of X."""
    x_value = reader.input("X")
    x = reader.known.layout(x_value, rank=3)
    if x is None or x_value is None:
        raise Refused("X must have three axes")
    width = length(x.axes[2])
    if isinstance(width, int) and width != layer.input_size:
        raise Refused(f"X has {width} features, W reads {layer.input_size}")
    time, batch = x.axes[:2] if layout == 0 else x.axes[1::-1]
    reader.findings += fixed_steps(reader.known, x_value, layout, reader.name)
    hidden = layer.recurrences[0].cell.hidden_size
    D = Atom(f"{reader.name}:directions", len(layer.recurrences))
    H = Atom(f"{reader.name}:units", hidden)
    outputs = reader.node.outputs
    y = outputs[0] if outputs and outputs[0].name else None
    if y is not None:
        over_time = (batch, time, axis(D), axis(H)) if layout else (time, axis(D), batch, axis(H))
        reader.known.track(y, Layout(y, over_time))
        reader.known.recurrent.add(y)
    for last in outputs[1:]:
        final = (batch, axis(D), axis(H)) if layout else (axis(D), batch, axis(H))
        reader.known.track(last, Layout(last, final))
    w = reader.input("W_scale" if reader.quantised else "W")
    dtype = "float32" if w is None or w.dtype is None else w.dtype.name.lower()
    return Read(
        layer,
        reader.node,
        x,
        y,
        time,
        batch,
        axis(D, H),
        plain_name(dtype),
        tuple(reader.findings),
        finals=frozenset(outputs[1:2]),
    )


def fixed_steps(known: Knowledge, x: ir.Value, axis: int, name: str) -> list[Finding]:
    """Say of a sequence, whose steps are along an axis, that the graph fixes how many there are."""
    steps = fixed_length(known, x, axis)
    if steps is None or steps < 2:
        return []
    text = f"the graph fixes its sequences at {steps} steps; what is proved holds for any"
    return [finding("RA126", name, text)]


_PLAIN = {"float": "float32", "double": "float64"}


def plain_name(dtype: str) -> str:
    """Name a data type as NumPy does."""
    return _PLAIN.get(dtype, dtype)


# --- weights --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Weights:
    W: Array  # [D, GH, I]
    R: Array  # [D, GH, H]
    B: Array  # [D, 2GH]
    P: Array | None  # [D, 3H]


def _weights(reader: _Reader, directions: int) -> _Weights:
    gates = GATES[reader.op]
    W, R = reader.weight("W"), reader.weight("R")
    if W is None or R is None:
        raise Refused(f"{reader.op} must have the inputs W and R")
    if R.ndim != 3 or R.shape[0] != directions or R.shape[1] != gates * R.shape[2]:
        raise Refused(f"R must have shape ({directions}, {gates}·hidden, hidden), got {R.shape}")
    hidden = R.shape[2]
    if hidden == 0:
        raise Refused("hidden_size must be at least 1, got 0")
    declared = _number(reader.node, "hidden_size", hidden)
    if declared != hidden:
        raise Refused(f"hidden_size is {declared} and R has {hidden} columns")
    if W.ndim != 3 or W.shape[:2] != (directions, gates * hidden):
        raise Refused(f"W must have shape ({directions}, {gates * hidden}, inputs), got {W.shape}")
    if W.shape[2] == 0:
        raise Refused("W must read at least 1 feature, got 0")
    B = reader.shaped("B", (directions, 2 * gates * hidden))
    P = reader.shaped("P", (directions, 3 * hidden)) if reader.op == "LSTM" else None
    return _Weights(W, R, np.zeros((directions, 2 * gates * hidden)) if B is None else B, P)


def _cell(
    reader: _Reader,
    weights: _Weights,
    direction: int,
    functions: tuple[Activation, ...],
    clip: float | None,
) -> Cell:
    order = _ORDER[reader.op]
    W = _gates(weights.W[direction], order)
    R = _gates(weights.R[direction], order)
    b_input, b_recurrent = (_gates(b, order) for b in np.split(weights.B[direction], 2))
    if reader.op == "RNN":
        return ElmanCell(R, W, b_input + b_recurrent, functions[0], clip)
    if reader.op == "GRU":
        after = _flag(reader.node, "linear_before_reset")
        return GRUCell(W, R, b_input, b_recurrent, after, functions[0], functions[1], clip)
    peephole = None
    if weights.P is not None:
        peephole = _gates(weights.P[direction], (0, 2, 1)).reshape(3, -1)  # i, o, f → i, f, o
    return LSTMCell(
        W,
        R,
        b_input + b_recurrent,
        peephole=peephole,
        input_forget=_flag(reader.node, "input_forget"),
        gate=functions[0],
        candidate=functions[1],
        squash=functions[2],
        clip=clip,
        clip_output=False,
    )


def _gates(rows: Array, order: Sequence[int]) -> Tensor:
    parts = np.split(rows, len(order))
    return torch.from_numpy(np.concatenate([parts[k] for k in order]))


def _functions(reader: _Reader, directions: int) -> tuple[tuple[Activation, ...], ...]:
    resolved = _resolved(reader.node, reader.op, directions)
    if resolved.disputed:
        reader.note(
            "RA111",
            f"{', '.join(dict.fromkeys(resolved.disputed))} without activation_alpha or "
            "activation_beta: ONNX Runtime takes 0 and is followed here, the operator's own "
            "default is another",
        )
    return resolved.directions


def _resolved(node: ir.Node, op: str, directions: int) -> Resolved:
    names = _attribute(node, "activations", lambda a: [str(n) for n in a.as_strings()], None)
    alphas, betas = (_floats(node, f"activation_{which}") for which in ("alpha", "beta"))
    return resolve(op, directions, names, alphas, betas)


def by_text(node: ir.Node, layer: Layer) -> Layer:
    """Return the layer of a node that was read, as the operator's text has it.

    It is another one where ONNX Runtime, which a reading follows, deviates from the text.
    """
    functions = _resolved(node, node.op_type, len(layer.recurrences)).by_text
    recurrences = []
    for recurrence, own in zip(layer.recurrences, functions, strict=True):
        cell = recurrence.cell
        if isinstance(cell, LSTMCell):
            gate, candidate, squash = own
            cell = replace(
                cell,
                gate=gate,
                candidate=candidate,
                squash=squash,
                clip_output=cell.clip is not None,
            )
        elif isinstance(cell, GRUCell):
            cell = replace(cell, gate=own[0], candidate=own[1])
        elif isinstance(cell, ElmanCell):
            cell = replace(cell, activation=own[0])
        recurrences.append(replace(recurrence, cell=cell))
    return replace(layer, recurrences=tuple(recurrences))


def _clip(reader: _Reader) -> float | None:
    clip = _attribute(reader.node, "clip", lambda a: float(a.as_float()), None)
    if clip is None:
        return None
    if not clip > 0 or math.isinf(clip):
        raise Refused(f"clip must be a positive number, got {clip:g}")
    if reader.op == "LSTM":
        reader.note(
            "RA110",
            f"clip = {clip:g}: the operator's text also clips the cell state before the last "
            "activation; ONNX Runtime does not and is followed here",
        )
    return clip


def _lengths(reader: _Reader) -> None:
    value = reader.input("sequence_lens")
    known = reader.known.constant(value)
    which = f"graph input {_name_of(value)!r}" if known is None else str(known.tolist()[:8])
    reader.note(
        "RA113",
        f"sequence_lens ({which}): outputs past a sequence's length are zero, and a reverse "
        "pass starts at that length; audited as if every sequence had full length",
    )


# --- initial states -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """One initial state; ``note`` is a finding's id and text, ``{}`` where ``input`` belongs."""

    input: str
    rows: Array  # [D, H]
    source: str
    name: str | None = None
    note: tuple[str, str] | None = None


def _states(reader: _Reader, directions: int, hidden: int, layout: int) -> list[InitialState]:
    parts = [_state(reader, "initial_h", directions, hidden, layout)]
    if reader.op == "LSTM":
        parts.append(_state(reader, "initial_c", directions, hidden, layout))
    for id_, text in dict.fromkeys(part.note for part in parts if part.note):
        which = [part.input for part in parts if part.note == (id_, text)]
        reader.note(id_, text.replace("{}", " and ".join(which), 1))
    source = next(
        (s for s in ("computed", "graph input", "constant") if any(p.source == s for p in parts)),
        "zero",
    )
    names = list(dict.fromkeys(p.name for p in parts if p.name and p.source == source))
    return [
        InitialState(
            torch.from_numpy(np.concatenate([p.rows[d] for p in parts])),
            source,  # type: ignore[arg-type]
            ", ".join(names) or None,
        )
        for d in range(directions)
    ]


def _state(reader: _Reader, name: str, directions: int, hidden: int, layout: int) -> _State:
    value = reader.input(name)
    zero = np.zeros((directions, hidden))
    if value is None:
        return _State(name, zero, "zero")
    known = reader.known.content(value)
    if known is None:
        return _unknown_state(reader, name, value, zero)
    core = (known.core if isinstance(known, Spread) else known).astype(np.float64)
    if core.ndim > 3 or not np.isfinite(core).all():
        raise Refused(f"{name} must hold finite numbers on three axes")
    core = core.reshape((1,) * (3 - core.ndim) + core.shape)
    if layout == 1:
        core = core.transpose(1, 0, 2)
    batch = core.shape[1]
    if core.shape[0] not in {1, directions} or core.shape[2] not in {1, hidden}:
        raise Refused(f"{name} must have shape ({directions}, batch, {hidden}), got {core.shape}")
    if batch == 0 or not (core == core[:, :1]).all():
        text = "{} " + f"stored with another state for each of {batch} batch rows; zero is assumed"
        return _State(name, zero, "computed", name, ("RA115", text))
    x = reader.known.layout(reader.input("X"), rank=3)
    free = x is None or not isinstance(length(x.axes[0 if layout else 1]), int)
    note = None
    if free and (batch > 1 or not isinstance(known, Spread)):
        text = f"the batch size is fixed at {batch} by {{}}, stored in the model"
        note = ("RA114", text)
    rows = np.broadcast_to(core[:, 0], (directions, hidden)).copy()
    return _State(name, rows, "constant" if rows.any() else "zero", note=note)


def _unknown_state(reader: _Reader, name: str, value: ir.Value, zero: Array) -> _State:
    sources = reader.wiring.roots(value)
    if any(_undefined(root) for root in sources):
        raise Refused(f"{name} ({value.name!r}) is defined nowhere in the file")
    if all(root.producer() is None for root in sources):
        return _State(name, zero, "graph input", ", ".join(_name_of(root) for root in sources))
    makers = sorted({_maker(root) for root in sources if root.producer() is not None})
    text = "{} " + f"computed inside the model (from {listed(makers)}); zero is assumed"
    return _State(name, zero, "computed", name, ("RA115", text))


def _maker(value: ir.Value) -> str:
    producer = value.producer()
    if producer is None:
        return _name_of(value)
    what = "the final state of " if producer.op_type in GATES else ""
    return f"{what}{producer.op_type} {producer.name or value.name!r}"


# --- attributes -----------------------------------------------------------------------------


def _attribute(
    node: ir.Node, name: str, read_: Callable[[ir.Attr], T], default: Default
) -> T | Default:
    attribute = node.attributes.get(name)
    if attribute is None:
        return default
    try:
        return read_(attribute)
    except (TypeError, ValueError, UnicodeDecodeError):
        raise Refused(f"attribute {name!r} has the wrong type ({attribute.type.name})") from None


def _text(node: ir.Node, name: str, default: str) -> str:
    return _attribute(node, name, lambda a: str(a.as_string()), default)


def _number(node: ir.Node, name: str, default: int) -> int:
    return _attribute(node, name, lambda a: int(a.as_int()), default)


def _flag(node: ir.Node, name: str) -> bool:
    return bool(_number(node, name, 0))


def _floats(node: ir.Node, name: str) -> list[float]:
    return _attribute(node, name, lambda a: [float(x) for x in a.as_floats()], [])


def _undefined(value: ir.Value) -> bool:
    """Whether a node reads a value that no node, input or initializer gives."""
    stored = value.is_initializer() or value.const_value is not None
    return value.producer() is None and not stored and not value.is_graph_input()


def _name_of(value: ir.Value | None) -> str:
    return "" if value is None or value.name is None else value.name


def _name_or_none(value: ir.Value | None) -> str | None:
    return None if value is None else value.name
