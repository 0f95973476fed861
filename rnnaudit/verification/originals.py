"""What the candidate is held against: a state_dict's cells in float64, or the given graph.

A state_dict is read twice, by our cells and by PyTorch's own modules; a graph runs in
ONNX Runtime, as the candidate does. Where our reading covers the model from input to
output, it also tells the truncation error from the conversion error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rnnaudit import cells, runtime
from rnnaudit.errors import UnsupportedModelError
from rnnaudit.model import (
    SIGMOID,
    TANH,
    ElmanCell,
    GRUCell,
    Layer,
    LSTMCell,
    Model,
    NamedCell,
    Stack,
    TracedCell,
)
from rnnaudit.runtime import Calls, Interface, Port
from rnnaudit.verification import live
from rnnaudit.verification.calls import (
    Manner,
    at_once,
    buffers,
    by_step,
    in_blocks,
    in_steps,
    stepped,
)
from rnnaudit.verification.inputs import Feed, ordered, sequences_of
from rnnaudit.verification.slots import Role, Slot, named, of_graph, of_port

Array = np.ndarray[Any, Any]

TIME_FIRST: tuple[Role, ...] = ("time", "batch")

AGREE = 1e-9
"""How far two float64 readings of the same weights may differ, relative to their size."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How the candidate's recurrences are truncated, by ``Recurrence.label``.

    ``blocks`` holds the steps between restarts of the state, 1 where none is named.
    """

    depths: Mapping[str, int]
    blocks: Mapping[str, int]

    def run(self, stack: Stack, x: Tensor) -> Tensor:
        """Return the truncated stack's outputs [N, T, O] in float64."""
        return cells.run_stack(stack, x, self.depths, self.blocks)


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What the original says to one feed.

    Attributes:
        outputs: Arrays by the candidate's output names.
        full: Our float64 reading of the original, by the same names; empty without one.
        cut: The same with every recurrence at its depth.
    """

    outputs: Mapping[str, Array]
    full: Mapping[str, Array]
    cut: Mapping[str, Array]


class Original(Protocol):
    """One of the two kinds of original."""

    slots: tuple[Slot, ...]
    error: str  # the runtime's last refusal of the original
    calls: Calls | None  # how the candidate is called, if not once a feed

    def answer(self, feeds: Sequence[Feed]) -> list[Answer | None]:
        """Run the original; None where it does not run on a feed."""
        ...

    def feed(self, feed: Feed) -> Mapping[str, Array]:
        """Return the feed by the candidate's input names."""
        ...

    def describe(self) -> str:
        """Say what the candidate was held against, once it has been."""
        ...

    def fault(self) -> str:
        """Say why the reference cannot be trusted; empty where it can."""
        ...


def _cannot(message: str, advice: str) -> UnsupportedModelError:
    return UnsupportedModelError(message, help=advice, id="RA304")


# ------------------------------------------------------------------------- state_dicts


class Weights:
    """Stacks without a graph: ``x`` to ``y`` for one, ``name/x`` to ``name/y`` for several."""

    def __init__(self, model: Model, whole: Interface, cut: Cut) -> None:
        """Match the candidate's inputs and outputs with the stacks."""
        self.error = ""
        self._whole, self._manner = whole, Manner.of(whole)
        candidate = self._manner.bare(whole)
        self._cut = cut
        self._source = model.source
        self._torch_difference: float | None = 0.0
        self._disagree = False
        for recurrence in model.recurrences():
            if recurrence.rounded:
                raise _cannot(
                    f"nothing is equivalent to {recurrence.label}: {recurrence.rounded}",
                    "compare with the model as it was before quantisation",
                )
        stacks, alone = _covered(model.stacks, candidate, cut.depths)
        self._missing = [stack.name for stack in model.stacks if stack not in stacks]
        self._pairs = [(stack, *_stack_ports(stack, candidate, alone=alone)) for stack in stacks]
        self.slots = tuple(slot for _, slot, _ in self._pairs)
        self.calls = in_blocks(self.slots, self._manner)

    def answer(self, feeds: Sequence[Feed]) -> list[Answer | None]:
        """Run every stack in float64."""
        return [self._one(feed) for feed in feeds]

    def _one(self, feed: Feed) -> Answer:
        full, cut = {}, {}
        for stack, slot, output in self._pairs:
            x = torch.from_numpy(
                sequences_of(feed.values[slot.name], slot.roles).astype(np.float64)
            )
            y = cells.run_stack(stack, x)
            self._check(stack, x, y)
            full[output] = ordered(y.numpy(), slot.roles)
            if self._cut.depths:
                cut[output] = ordered(self._cut.run(stack, x).numpy(), slot.roles)
        return Answer(full, full, cut)

    def _check(self, stack: Stack, x: Tensor, y: Tensor) -> None:
        """Compare our reading with PyTorch's modules."""
        module = self._source.get(stack.name)
        theirs = None if module is None else live.outputs(module, stack, x)
        if theirs is None:
            theirs = torch_outputs(stack, x)
        if theirs is None:
            self._torch_difference = None
            return
        if not (theirs.isfinite().all() and y.isfinite().all()):
            return  # the judge refuses infinities
        difference = float((theirs - y).abs().max())
        if self._torch_difference is not None:
            self._torch_difference = max(self._torch_difference, difference)
        if difference > AGREE * max(1.0, float(theirs.abs().max())):
            self._disagree = True

    def feed(self, feed: Feed) -> Mapping[str, Array]:
        """Return the feed; it is made for the candidate's own inputs."""
        empty = buffers(self._whole.inputs, self._manner.past, feed, feed.values)
        return {**feed.values, **empty}

    def describe(self) -> str:
        """Name both readings and their difference, and what the candidate does not hold."""
        missing = ", ".join(self._missing)
        left = f"; not compared, since the candidate lacks them: {missing}" if missing else ""
        if self._torch_difference is None:
            return f"the weights read in float64 (PyTorch has no module with these options){left}"
        return (
            "the weights read in float64, and by PyTorch's own modules "
            f"(difference {self._torch_difference:.1e}){left}"
        )

    def fault(self) -> str:
        """Report a difference between the two readings, which is our fault."""
        if not self._disagree:
            return ""
        return (
            f"rnnaudit's reading of the weights differs from PyTorch's by "
            f"{self._torch_difference:.1e}: please report this"
        )


def _covered(
    stacks: Sequence[Stack], candidate: Interface, depths: Mapping[str, int]
) -> tuple[Sequence[Stack], bool]:
    """Return the stacks that the candidate holds, and whether it holds one alone."""
    names = {port.name for port in candidate.inputs}
    named_ = [stack for stack in stacks if f"{stack.name}/x" in names]
    cut = [stack for stack in stacks if any(r.label in depths for r in stack.recurrences())]
    if named_:
        return named_, False
    chosen = cut if len(cut) == 1 else stacks
    return chosen, len(chosen) == 1


def _stack_ports(stack: Stack, candidate: Interface, *, alone: bool) -> tuple[Slot, str]:
    """Find the candidate's input and output of a stack."""
    inputs, outputs = candidate.inputs, candidate.outputs
    if not alone:
        inputs = tuple(p for p in inputs if p.name == f"{stack.name}/x")
        outputs = tuple(p for p in outputs if p.name == f"{stack.name}/y")
    if len(inputs) != 1 or not outputs:
        names = ", ".join(p.name for p in candidate.inputs) or "none"
        wanted = "one input and an output" if alone else f"{stack.name}/x and {stack.name}/y"
        raise _cannot(
            f"the candidate must have {wanted}, got the inputs {names}",
            "compare the recurrent part alone",
        )
    port = inputs[0]
    slot = of_port(port, _roles(port), complete=False)
    if slot.features != stack.input_size or slot.roles.count(None) != 1:
        raise _cannot(
            f"the candidate must read sequences of {stack.input_size} features, got input "
            f"{port.name} of shape {list(port.shape or ())}",
            "is it a candidate for this model?",
        )
    return slot, outputs[0].name


def _roles(port: Port) -> tuple[Role | None, ...]:
    """Take the last axis for the features; before it time and batch, by name or in this order."""
    leading = [named(d) if isinstance(d, str) else None for d in (port.shape or ())[:-1]]
    free: list[Role] = [role for role in TIME_FIRST if role not in leading]
    return (*[role or (free.pop(0) if free else None) for role in leading], None)


def torch_outputs(stack: Stack, x: Tensor) -> Tensor | None:
    """Run a stack on x [N, T, I] with nn.RNN, nn.GRU and nn.LSTM in float64.

    Returns:
        The outputs [N, T, O], or None where PyTorch lacks an option of a cell.
    """
    with torch.no_grad():
        for layer in stack.layers:
            module = _torch_module(layer)
            if module is None:
                return None
            starts = torch.stack([r.initial.value for r in layer.recurrences])
            h = starts[:, : layer.recurrences[0].cell.hidden_size]
            c = starts[:, h.shape[1] :]
            batch = [s.unsqueeze(1).expand(-1, x.shape[0], -1).contiguous() for s in (h, c)]
            x, _ = module(x, tuple(batch) if isinstance(module, torch.nn.LSTM) else batch[0])
    return cells.readout(stack, x)


def _torch_module(layer: Layer) -> torch.nn.RNNBase | None:
    """Return the PyTorch module of one layer, or None where there is none."""
    each = [(r, cell) for r in layer.recurrences if not isinstance(cell := r.cell, TracedCell)]
    if len(each) < len(layer.recurrences) or layer.recurrences[0].reverse:
        return None
    if any(not _in_torch(cell) for _, cell in each):
        return None
    first = each[0][1]
    H = first.cell_size if isinstance(first, LSTMCell) else first.hidden_size
    settings: dict[str, Any] = {
        "batch_first": True,
        "bidirectional": layer.bidirectional,
        "dtype": torch.float64,
    }
    module: torch.nn.RNNBase
    if isinstance(first, ElmanCell):
        settings["nonlinearity"] = first.activation.name
        module = torch.nn.RNN(first.input_size, H, **settings)
    elif isinstance(first, GRUCell):
        module = torch.nn.GRU(first.input_size, H, **settings)
    else:
        settings["proj_size"] = 0 if first.projection is None else first.hidden_size
        module = torch.nn.LSTM(first.input_size, H, **settings)
    weights = {
        f"{key}_l0{'_reverse' if r.reverse else ''}": value
        for r, cell in each
        for key, value in _torch_weights(cell).items()
    }
    module.load_state_dict(weights)
    return module


def _in_torch(cell: NamedCell) -> bool:
    if cell.clip is not None:
        return False
    if isinstance(cell, ElmanCell):
        return cell.activation.name in ("tanh", "relu")
    gates = cell.gate == SIGMOID and cell.candidate == TANH
    if isinstance(cell, GRUCell):
        return gates and cell.reset_after
    return gates and cell.squash == TANH and cell.peephole is None and not cell.input_forget


def _torch_weights(cell: NamedCell) -> Mapping[str, Tensor]:
    if isinstance(cell, ElmanCell):
        named = (cell.U, cell.W, cell.b, torch.zeros_like(cell.b))
    elif isinstance(cell, GRUCell):
        named = (cell.W, cell.U, cell.b_input, cell.b_recurrent)
    else:
        named = (cell.W, cell.U, cell.b, torch.zeros_like(cell.b))
    keys = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    weights = dict(zip(keys, named, strict=True))
    if isinstance(cell, LSTMCell) and cell.projection is not None:
        weights["weight_hr"] = cell.projection
    return weights


# ------------------------------------------------------------------------------ graphs


class Graph:
    """The given ONNX graph in ONNX Runtime, and our reading beside it where that covers it."""

    def __init__(self, model: Model, whole: Interface, cut: Cut) -> None:
        """Match the candidate's inputs and outputs with the graph's."""
        own = runtime.describe(model.runnable())
        self._whole, self._manner = whole, Manner.of(whole)
        candidate = self._manner.bare(whole)
        self._model, self._cut = model, cut
        self._inputs = _match(own.inputs, candidate.inputs, "input")
        self._outputs = _match(own.outputs, candidate.outputs, "output")
        unmet = [p.name for p in candidate.inputs if p.name not in self._inputs.values()]
        if unmet:
            raise _cannot(
                f"the candidate must read what the original reads, got the input {unmet[0]}, which "
                "the original does not have",
                "rename it to the original's",
            )
        if not self._outputs:
            raise _cannot(
                f"the candidate must have an output of the original's, "
                f"{', '.join(p.name for p in own.outputs)}, got "
                f"{', '.join(p.name for p in candidate.outputs) or 'none'}",
                "name the outputs alike",
            )
        lacking = [p.name for p in own.outputs if p.name not in self._outputs]
        self._missing = [name for name in lacking if name not in self._manner.dropped]
        ports = {p.name: p for p in candidate.inputs}
        self.slots = tuple(
            slot.within(ports[self._inputs[slot.name]]) if slot.name in self._inputs else slot
            for slot in of_graph(model, own)
        )
        self._own_calls, self.calls = None, in_blocks(self.slots, self._manner)
        last = bool(self._manner.last_step_of)
        states = by_step(model, self.slots) if last or self._manner.past else {}
        if states:
            self.slots = tuple(stepped(slot, states) for slot in self.slots)
            self._own_calls = in_steps(self.slots, states, last=last)
            kept = {n: out for n, out in states.items() if n in self._inputs.values()}
            carry = {**kept, **self._manner.past}
            self.calls = None if last else in_steps(self.slots, carry, last=False)
            # A state that is carried is no result.
            self._outputs = {n: t for n, t in self._outputs.items() if n not in states.values()}
        # Our reading assumes zero where the graph computes an initial state.
        own_states = all(r.initial.source in ("zero", "constant") for r in model.recurrences())
        covered = model.whole and bool(model.stacks) and own_states
        self._site = model.stacks[0].layers[0].site if covered and not states else None
        self._reading_difference: float | None = None
        self.error = ""

    def answer(self, feeds: Sequence[Feed]) -> list[Answer | None]:
        """Run the graph; where it refuses, ever fewer feeds, so that one cannot spoil the rest."""
        fetch = list(self._outputs) + ([self._site.x] if self._site else [])
        given = [f.values for f in feeds]
        outcome = runtime.run(self._model.runnable(), given, fetch=fetch, calls=self._own_calls)
        if outcome.outputs is not None:
            return [self._read(found) for found in outcome.outputs]
        self.error = outcome.error or ""
        if len(feeds) == 1:
            return [None]
        parts = _parts(feeds)
        if _refused_all(self.error) or (len(parts) == 1 and not self._ends_run(feeds)):
            return [None] * len(feeds)
        answers: dict[int, Answer | None] = {}
        for part in parts if len(parts) > 1 else _halves(parts[0]):
            answers |= zip(part, self.answer([feeds[i] for i in part]), strict=True)
        return [answers[i] for i in range(len(feeds))]

    def _ends_run(self, feeds: Sequence[Feed]) -> bool:
        """Return whether the cheapest or the dearest runs; the user's own are all tried."""
        if len(feeds) <= 3 or feeds[0].own:
            return True
        return any(self.answer([feed])[0] is not None for feed in (feeds[0], feeds[-1]))

    def _read(self, found: Mapping[str, Array]) -> Answer:
        outputs = {theirs: found[own] for own, theirs in self._outputs.items()}
        if self._site is None:
            return Answer(outputs, {}, {})
        stack = self._model.stacks[0]
        seen = found[self._site.x].astype(np.float64)
        x = torch.from_numpy(seen if self._site.layout == 1 else seen.swapaxes(0, 1).copy())
        full = _placed(stack, cells.run_stack(stack, x), outputs)
        cut = _placed(stack, self._cut.run(stack, x), full) if self._cut.depths else {}
        for name, y in full.items():
            difference = float(np.abs(y - outputs[name]).max(initial=0.0))
            self._reading_difference = max(self._reading_difference or 0.0, difference)
        return Answer(outputs, full, cut)

    def feed(self, feed: Feed) -> Mapping[str, Array]:
        """Return what the candidate reads of the feed, by its own names."""
        given = {theirs: feed.values[own] for own, theirs in self._inputs.items()}
        if self._own_calls is not None and self.calls is None:  # the steps of a sequence at once
            axes = self._manner.last_step_of
            given |= {
                name: at_once(given[name], axes[name]) if name in axes else given[name][-1]
                for name in self._own_calls.axes
                if name in given
            }
        return {**given, **buffers(self._whole.inputs, self._manner.past, feed, given)}

    def describe(self) -> str:
        """Name the runtime, and how far our reading is from it."""
        text = "the original in ONNX Runtime"
        if self._reading_difference is None:
            return text
        return f"{text} (its float64 reading differs by {self._reading_difference:.1e})"

    def fault(self) -> str:
        """Name outputs that cannot be compared: the candidate must have them all."""
        if not self._missing:
            return ""
        return f"the candidate lacks the original's output {', '.join(self._missing)}"


def _refused_all(error: str) -> bool:
    """Return whether the runtime refused the model itself, whatever it is fed."""
    return any(word in error for word in ("InvalidGraph", "NotImplemented", "initialization"))


def _parts(feeds: Sequence[Feed]) -> list[list[int]]:
    """Group feeds by batch size, the user's own apart: what fails often fails together."""
    groups: dict[tuple[int, bool], list[int]] = {}
    for i, feed in enumerate(feeds):
        groups.setdefault((feed.tried.batch, feed.own), []).append(i)
    return list(groups.values())


def _halves(part: list[int]) -> tuple[list[int], list[int]]:
    return part[: len(part) // 2], part[len(part) // 2 :]


def _match(own: Sequence[Port], theirs: Sequence[Port], what: str) -> dict[str, str]:
    """Pair ports by name; a single one on both sides needs no name."""
    names = {p.name for p in theirs}
    common = {p.name: p.name for p in own if p.name in names}
    if not common and len(own) == len(theirs) == 1:
        return {own[0].name: theirs[0].name}
    return common


def _placed(stack: Stack, y: Tensor, like: Mapping[str, Array]) -> Mapping[str, Array]:
    """Give the stack's outputs y [N, T, O] the axes of the one graph output that they are.

    Recurrent nodes put time first and may keep the directions apart; graphs turn it round.
    """
    array = y.numpy()
    N, T, O = array.shape  # noqa: E741
    D = len(stack.layers[-1].recurrences)
    apart = array.reshape(N, T, D, O // D) if O % D == 0 and stack.readout is None else None
    forms = [array, array.swapaxes(0, 1)]
    if apart is not None:
        forms += [apart.transpose(1, 2, 0, 3), apart]
    near = [
        (float(np.abs(form - wanted).max(initial=0.0)), name, form)
        for name, wanted in like.items()
        for form in forms
        if form.shape == wanted.shape and np.isfinite(wanted).all()
    ]
    if not near:
        return {}
    _, name, form = min(near, key=lambda n: n[0])
    return {name: form}
