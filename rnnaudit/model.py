"""A recurrent model as data: cells, the recurrences they make, and the stacks those form.

Matrices are float64 and exact copies of the stored weights (float16 and float32
convert exactly). The recurrent matrix is ``W`` and the input matrix ``U`` in an
Elman cell; in a gated cell ``U`` is recurrent and ``W`` reads the input, the gates'
rows stacked.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from rnnaudit.results import Finding, Skipped

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True, slots=True)
class Activation:
    """An elementwise function by its ONNX name in lower case, e.g. ``tanh`` or ``leakyrelu``."""

    name: str
    alpha: float | None = None
    beta: float | None = None


TANH = Activation("tanh")
RELU = Activation("relu")
SIGMOID = Activation("sigmoid")


def _width(matrix: Tensor, what: str) -> int:
    """Return the number of columns of what must be a matrix."""
    if matrix.ndim != 2:
        raise ValueError(f"{what} must be a matrix, got shape {tuple(matrix.shape)}")
    return int(matrix.shape[1])


def _check(matrix: Tensor, shape: tuple[int, ...], what: str) -> None:
    if tuple(matrix.shape) != shape:
        raise ValueError(f"{what} must have shape {shape}, got {tuple(matrix.shape)}")
    if matrix.dtype != torch.float64:
        raise ValueError(f"{what} must be float64, got {matrix.dtype}; convert it before")


@dataclass(frozen=True, slots=True, eq=False)
class ElmanCell:
    """h' = φ(W h + U x + b), each pre-activation clipped to ±clip where clip is given.

    Shapes: W [H, H], U [H, I], b [H].
    """

    W: Tensor
    U: Tensor
    b: Tensor
    activation: Activation = TANH
    clip: float | None = None

    def __post_init__(self) -> None:
        """Check every shape."""
        H = _width(self.W, "W")
        if self.W.shape[0] != H:
            raise ValueError(
                f"recurrent weights must be square, got shape {tuple(self.W.shape)}; "
                "is it the input weight?"
            )
        _check(self.W, (H, H), "W")
        _check(self.U, (H, _width(self.U, "U")), "U")
        _check(self.b, (H,), "b")

    @property
    def kind(self) -> str:
        """The cell's family, as reports name it."""
        return "elman"

    @property
    def input_size(self) -> int:
        """Width I of the input."""
        return int(self.U.shape[1])

    @property
    def hidden_size(self) -> int:
        """Width H of the output h."""
        return int(self.W.shape[0])

    @property
    def state_size(self) -> int:
        """Width of the state that is carried between steps."""
        return self.hidden_size

    @property
    def options(self) -> Mapping[str, object]:
        """What sets this cell apart from its family's default."""
        return {"activation": self.activation.name, **_clip(self.clip)}


@dataclass(frozen=True, slots=True, eq=False)
class GRUCell:
    """Gated recurrent unit; gates stacked in the order r, z, n.

    r = σ(W_r x + b_r + U_r h + c_r), z likewise, h' = (1 − z) n + z h, and with
    ``reset_after`` (ONNX linear_before_reset = 1, PyTorch)
    n = tanh(W_n x + b_n + r (U_n h + c_n)), else n = tanh(W_n x + b_n + U_n (r h) + c_n).

    Shapes: W [3H, I], U [3H, H], b_input (b) and b_recurrent (c) [3H].
    """

    W: Tensor
    U: Tensor
    b_input: Tensor
    b_recurrent: Tensor
    reset_after: bool = True
    gate: Activation = SIGMOID
    candidate: Activation = TANH
    clip: float | None = None

    def __post_init__(self) -> None:
        """Check every shape."""
        H = _width(self.U, "U")
        _check(self.U, (3 * H, H), "U")
        _check(self.W, (3 * H, _width(self.W, "W")), "W")
        _check(self.b_input, (3 * H,), "b_input")
        _check(self.b_recurrent, (3 * H,), "b_recurrent")

    @property
    def kind(self) -> str:
        """The cell's family, as reports name it."""
        return "gru"

    @property
    def input_size(self) -> int:
        """Width I of the input."""
        return int(self.W.shape[1])

    @property
    def hidden_size(self) -> int:
        """Width H of the output h."""
        return int(self.U.shape[1])

    @property
    def state_size(self) -> int:
        """Width of the state that is carried between steps."""
        return self.hidden_size

    @property
    def options(self) -> Mapping[str, object]:
        """What sets this cell apart from its family's default."""
        return {
            "linear_before_reset": int(self.reset_after),
            "activations": [self.gate.name, self.candidate.name],
            **_clip(self.clip),
        }


@dataclass(frozen=True, slots=True, eq=False)
class LSTMCell:
    """Long short-term memory; gates stacked in the order i, f, g, o; state (h, c).

    i = σ(a_i + p_i c), f = σ(a_f + p_f c) (or 1 − i with ``input_forget``), g = tanh(a_g),
    c' = f c + i g, o = σ(a_o + p_o c'), h' = R (o tanh(c')), with a = W x + U h + b.
    ``clip`` bounds the gates' pre-activations to ±clip; ``clip_output`` also bounds c'
    inside the last tanh, as the ONNX text has it and ONNX Runtime does not.

    Shapes: W [4H, I], U [4H, P], b [4H], peephole [3, H] (i, f, o), projection R [P, H];
    P = H without a projection.
    """

    W: Tensor
    U: Tensor
    b: Tensor
    peephole: Tensor | None = None
    projection: Tensor | None = None
    input_forget: bool = False
    gate: Activation = SIGMOID
    candidate: Activation = TANH
    squash: Activation = TANH
    clip: float | None = None
    clip_output: bool = False

    def __post_init__(self) -> None:
        """Check every shape."""
        H, P = self.cell_size, _width(self.U, "U")
        _check(self.U, (4 * H, P), "U")
        _check(self.W, (4 * H, _width(self.W, "W")), "W")
        _check(self.b, (4 * H,), "b")
        if self.peephole is not None:
            _check(self.peephole, (3, H), "peephole")
        if self.projection is not None:
            _check(self.projection, (P, H), "projection")
        elif P != H:
            raise ValueError(f"U must have {H} columns without a projection, got {P}")

    @property
    def kind(self) -> str:
        """The cell's family, as reports name it."""
        return "lstm"

    @property
    def input_size(self) -> int:
        """Width I of the input."""
        return int(self.W.shape[1])

    @property
    def cell_size(self) -> int:
        """Width of c."""
        return int(self.U.shape[0]) // 4

    @property
    def hidden_size(self) -> int:
        """Width of the output h (of the projection where there is one)."""
        return int(self.U.shape[1])

    @property
    def state_size(self) -> int:
        """Width of the state (h, c) that is carried between steps."""
        return self.hidden_size + self.cell_size

    @property
    def options(self) -> Mapping[str, object]:
        """What sets this cell apart from its family's default."""
        return {
            "activations": [self.gate.name, self.candidate.name, self.squash.name],
            **({"input_forget": 1} if self.input_forget else {}),
            **({"peephole": True} if self.peephole is not None else {}),
            **({"proj_size": self.hidden_size} if self.projection is not None else {}),
            **_clip(self.clip),
        }


@dataclass(frozen=True, slots=True)
class Port:
    """A value that a traced step takes or gives: its name there, and its shape for one sequence.

    ``kind`` is what the step reads: ``float``, ``int`` or ``bool``; all are kept as float64.
    """

    name: str
    shape: tuple[int, ...]
    kind: Literal["float", "int", "bool"] = "float"

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Operation:
    """One ONNX operator of a traced step; an absent input has the empty name."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, object]


@dataclass(frozen=True, slots=True, eq=False)
class TracedCell:
    """A step as the graph writes it: operators from the states and inputs to the next states.

    The state is the parts of ``states`` side by side, each flattened, those of the output h
    first; the input is ``inputs`` side by side. ``next_states`` names what replaces each part.

    Attributes:
        operations: In the order in which they run; the opset is folded into their meaning.
        constants: Float tensors in float64, the others in int64 or bool.
        inputs: What each step reads.
        states: What each step is given by the one before.
        next_states: The names of the values that become ``states``.
        outputs: How many of the states, from the first, are the output.
    """

    operations: tuple[Operation, ...]
    constants: Mapping[str, Tensor]
    inputs: tuple[Port, ...]
    states: tuple[Port, ...]
    next_states: tuple[str, ...]
    outputs: int = 1

    def __post_init__(self) -> None:
        """Check that every state is replaced, and that something is carried."""
        if not self.states or len(self.states) != len(self.next_states):
            raise ValueError(
                f"each of {len(self.states)} states must have one that follows it, "
                f"got {len(self.next_states)}"
            )
        if not 1 <= self.outputs <= len(self.states):
            raise ValueError(f"the output must be 1 to {len(self.states)} states")

    @property
    def kind(self) -> str:
        """The cell's family, as reports name it."""
        return "traced"

    @property
    def input_size(self) -> int:
        """Width I of the input, all that a step reads side by side."""
        return sum(port.size for port in self.inputs)

    @property
    def hidden_size(self) -> int:
        """Width H of the output h."""
        return sum(port.size for port in self.states[: self.outputs])

    @property
    def state_size(self) -> int:
        """Width of the state that is carried between steps."""
        return sum(port.size for port in self.states)

    @property
    def options(self) -> Mapping[str, object]:
        """What sets this cell apart: its operators and the sizes of what it carries."""
        return {
            "operators": len(self.operations),
            "states": [f"{port.name} {list(port.shape)}" for port in self.states],
        }


NamedCell = ElmanCell | GRUCell | LSTMCell
"""Cells whose form is known: what can be proved, and written again, is of these."""

Cell = NamedCell | TracedCell


def _clip(clip: float | None) -> dict[str, object]:
    return {} if clip is None else {"clip": clip}


@dataclass(frozen=True, slots=True, eq=False)
class InitialState:
    """The state before the first step: ``value`` [S], and where it comes from.

    ``source`` is ``zero`` (absent or all zero), ``constant`` (stored in the model),
    ``graph input`` (the caller's, named; several names are joined by ``, ``) or ``computed``
    (by the model itself). In the last two ``value`` is the zero that the audit assumes.
    """

    value: Tensor
    source: Literal["zero", "constant", "graph input", "computed"] = "zero"
    name: str | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """The graph inputs that the caller gives it in."""
        given = self.source == "graph input" and self.name
        return tuple(given.split(", ")) if given else ()

    def describe(self) -> str:
        """Say in a few words which state is assumed."""
        if self.source == "graph input":
            return f"zero assumed for graph input {self.name}"
        if self.source == "computed":
            return "zero assumed for a state that the model computes"
        return self.source


@dataclass(frozen=True, slots=True, eq=False)
class Recurrence:
    """One cell run over time in one direction.

    ``rounded`` says why the file computes something else than this cell, where it does: such
    a recurrence is audited, and nothing is claimed equivalent to it.
    """

    name: str
    layer: int
    cell: Cell
    initial: InitialState
    reverse: bool = False
    rounded: str = ""

    def __post_init__(self) -> None:
        """Check that the initial state is a state of the cell."""
        _check(self.initial.value, (self.cell.state_size,), "the initial state")

    @property
    def direction(self) -> Literal["forward", "reverse"]:
        """The direction in time."""
        return "reverse" if self.reverse else "forward"

    @property
    def label(self) -> str:
        """A name that is unique in the model: stack, layer and direction."""
        return f"{self.name}[{self.layer}]{' reverse' if self.reverse else ''}"


@dataclass(frozen=True, slots=True)
class Reading:
    """A value that a traced recurrence reads: its axes of time and batch, None where it has none.

    Without an axis of time every step reads the whole value.
    """

    value: str
    time: int | None
    batch: int | None


@dataclass(frozen=True, slots=True)
class Outlets:
    """Where a Loop or a Scan gives what a node would: names of values, empty where none is read.

    ``steps`` is h after every step, its axis of time ``time``; ``finals`` hold the parts of
    the state after the last step, [N, width]. ``obstacle`` says why no node can stand here.
    """

    steps: str
    time: int
    finals: tuple[str, ...]
    obstacle: str = ""


@dataclass(frozen=True, slots=True)
class Site:
    """The node of the source graph that a layer was read from.

    ``x`` names the value it reads and ``layout`` is 0 for [T, N, I], 1 for [N, T, I].
    ``sequence_lens`` names that input where it is given. ``scope`` is the path of the
    branch that holds the node (``If node[then]``), empty at the top of the graph.
    ``reads`` says the same of a recurrence that was read from other operators: the features
    of each value, flattened, side by side are what it reads. ``carries`` names the values
    that hold a part of its state before the first step and after the last.
    """

    node: str
    x: str
    layout: int = 0
    sequence_lens: str | None = None
    scope: str = ""
    reads: tuple[Reading, ...] = ()
    carries: tuple[tuple[str, str], ...] = ()
    outlets: Outlets | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One or two recurrences over the same input, their outputs side by side."""

    recurrences: tuple[Recurrence, ...]
    site: Site | None = None

    @property
    def bidirectional(self) -> bool:
        """Whether the layer also reads the future."""
        return len(self.recurrences) == 2

    @property
    def input_size(self) -> int:
        """Width of the input."""
        return self.recurrences[0].cell.input_size

    @property
    def output_size(self) -> int:
        """Width of the output, both directions together."""
        return sum(r.cell.hidden_size for r in self.recurrences)


@dataclass(frozen=True, slots=True, eq=False)
class Readout:
    """y = A h + b, the linear layer that unmistakably follows a stack. A [O, F], b [O]."""

    name: str
    A: Tensor
    b: Tensor

    def __post_init__(self) -> None:
        """Check every shape."""
        _check(self.A, (len(self.A), _width(self.A, "A")), "A")
        _check(self.b, (len(self.A),), "b")


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """Layers that feed one another, and at most one linear layer after them.

    This is one ``nn.RNN``, ``nn.GRU`` or ``nn.LSTM`` in eval mode.
    """

    name: str
    layers: tuple[Layer, ...]
    readout: Readout | None = None

    def __post_init__(self) -> None:
        """Check that each layer reads what the one before it gives."""
        width = self.input_size
        for layer in self.layers:
            for r in layer.recurrences:
                if r.cell.input_size != width:
                    raise ValueError(
                        f"{r.label} must read {width} features, got a cell that reads "
                        f"{r.cell.input_size}"
                    )
            width = layer.output_size
        if self.readout is not None and self.readout.A.shape[1] != width:
            raise ValueError(
                f"the readout {self.readout.name} must read {width} features, got A of shape "
                f"{tuple(self.readout.A.shape)}"
            )

    @property
    def input_size(self) -> int:
        """Width of the input."""
        return self.layers[0].input_size

    @property
    def output_size(self) -> int:
        """Width of what leaves the stack: the readout's output where there is one."""
        return int(self.readout.A.shape[0]) if self.readout else self.layers[-1].output_size

    @property
    def causal(self) -> bool:
        """Whether every layer runs forward in time only."""
        return not any(r.reverse for r in self.recurrences())

    def recurrences(self) -> Iterator[Recurrence]:
        """Yield each recurrence, first layer first, forward before reverse."""
        for layer in self.layers:
            yield from layer.recurrences


NAMED = 6
"""Recurrences that a model names when it is printed."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Model:
    """What a loader read: stacks, the source graph where there is one, and what was left out.

    ``whole`` says that the one stack with its readout is the model from its input to its
    output, so that an error of the stack is an error end to end. ``inlined`` says that the
    graph has functions written out, ``completed`` that it stores weights which the file takes
    as inputs. ``source`` holds the live modules that stacks were read from, and ``twins`` the
    layers of their copies in other branches of the graph, both by the stack's name.
    """

    path: Path
    format: str
    sha256: str
    stacks: tuple[Stack, ...]
    whole: bool
    graph: ir.Model | None = None
    inlined: bool = False
    completed: bool = False
    dtype: str = "float32"
    skipped: tuple[Skipped, ...] = ()
    findings: tuple[Finding, ...] = ()
    source: Mapping[str, nn.Module] = field(default_factory=dict)
    twins: Mapping[str, tuple[Layer, ...]] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Name the file and its recurrences, and leave the weights out."""
        labels = [r.label for r in self.recurrences()]
        shown = ", ".join(map(repr, labels[:NAMED]))
        more = f", … {len(labels) - NAMED} more" if len(labels) > NAMED else ""
        return (
            f"Model(path={str(self.path)!r}, format={self.format!r}, whole={self.whole}, "
            f"recurrences=[{shown}{more}], skipped={len(self.skipped)}, "
            f"findings={[f.id for f in self.findings]})"
        )

    @property
    def direct(self) -> bool:
        """Whether stacks read the caller's inputs: no other operator of a graph is around them."""
        return self.graph is None or self.whole

    def runnable(self, *, inside: bool = False) -> Path | bytes:
        """Return what a runtime runs: the file, or the graph where the file does not do.

        Args:
            inside: Values inside functions are fetched, where the file holds them in functions.
        """
        if self.graph is None or not (self.completed or (inside and self.inlined)):
            return self.path
        import onnx_ir as ir

        own = ir.external_data.load_to_model(self.graph.clone())
        written: bytes = ir.to_proto(own).SerializeToString()
        return written

    def recurrences(self) -> Iterator[Recurrence]:
        """Yield each recurrence of each stack."""
        for stack in self.stacks:
            yield from stack.recurrences()


def fingerprint(recurrence: Recurrence) -> str:
    """Hash a recurrence's cell and initial state: sha256 over names, shapes and float64 bytes."""
    digest = hashlib.sha256(type(recurrence.cell).__name__.encode())
    parts = [(f.name, getattr(recurrence.cell, f.name)) for f in fields(recurrence.cell)]
    for name, value in [*parts, ("initial", recurrence.initial.value)]:
        entries = value.items() if isinstance(value, Mapping) else [("", value)]
        for key, entry in entries:
            digest.update(f"|{name}{key and f'.{key}'}=".encode())
            if isinstance(entry, Tensor):
                digest.update(repr(tuple(entry.shape)).encode())
                digest.update(entry.contiguous().cpu().numpy().astype("<f8").tobytes())
            else:
                digest.update(repr(entry).encode())
    return digest.hexdigest()
