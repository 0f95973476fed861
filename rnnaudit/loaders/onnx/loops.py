"""Loop and Scan nodes: which of what they carry is memory, and what every step reads.

A loop carries more than its state: a step counter, a condition, weights that never change,
arrays that outputs are collected in. Only what a later step reads of an earlier one's
numbers is state. A sequence is what every step reads one entry of, at an index that the
counter decides; counting down, the loop runs backwards in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from rnnaudit.findings import finding
from rnnaudit.loaders.interface import listed
from rnnaudit.loaders.onnx.apart import Ports, alone, keep_apart
from rnnaudit.loaders.onnx.axes import Atom, Axis, Layout, Size, axis, length
from rnnaudit.loaders.onnx.bodies import (
    STANDARD,
    Carried,
    Entering,
    captured,
    region,
    resolved,
    trace,
)
from rnnaudit.loaders.onnx.counting import Counting
from rnnaudit.loaders.onnx.indices import DEEPEST, WIDE, Indices, same_number
from rnnaudit.loaders.onnx.initial import initial_state
from rnnaudit.loaders.onnx.masks import Step, blending, keeps, open_masks, opened, through
from rnnaudit.loaders.onnx.nodes import Read, fixed_steps, plain_name
from rnnaudit.loaders.onnx.refusal import Refused
from rnnaudit.loaders.onnx.shapes import filled, for_one, shape_of
from rnnaudit.loaders.onnx.wiring import Wiring
from rnnaudit.model import (
    InitialState,
    Layer,
    Outlets,
    Reading,
    Recurrence,
    Site,
    TracedCell,
)
from rnnaudit.results import Finding

LOOPS = frozenset({"Loop", "Scan"})

LONGEST = 2**31 - 1
"""Steps that mean "as many as there are", where a Loop is given a number of them."""

_COLLECTS = frozenset({"Concat", "SequenceInsert", "ScatterElements", "ScatterND", "Scatter"})


@dataclass(frozen=True, slots=True, eq=False)
class Variable:
    """What one step hands to the next: its names inside the body, its start, its last value."""

    before: ir.Value
    after: ir.Value
    start: ir.Value
    final: ir.Value | None

    @property
    def dtype(self) -> ir.DataType:
        """Its type; float where none is declared."""
        return self.before.dtype or self.start.dtype or self.after.dtype or ir.DataType.FLOAT


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """What every step reads one entry of: ``entry`` in the body is ``whole`` at the step's index.

    ``time`` is the axis that is read along, None where every step reads the same. ``kept``
    says that the entry keeps the axis, with length 1. ``batch`` is an axis that the body
    never sees (Scan of opset 8).
    """

    entry: ir.Value
    whole: ir.Value
    time: int | None
    reverse: bool = False
    kept: bool = False
    batch: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """What every step gives, stacked along ``time``: ``entry`` in the body, ``whole`` after it."""

    entry: ir.Value
    whole: ir.Value
    time: int = 0
    reverse: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Looped:
    """A Loop or a Scan with its wiring laid open; ``counters`` are what counts its steps."""

    node: ir.Node
    body: ir.Graph
    variables: list[Variable]
    sequences: list[Source]
    outputs: list[Output]
    counters: set[ir.Value]
    step: ir.Value | None = None
    trips: ir.Value | None = None
    condition: ir.Value | None = None


def read_loop(node: ir.Node, wiring: Wiring, name: str, scope: str, opset: int) -> Read | None:
    """Read a Loop or a Scan; None where nothing that it carries is memory.

    Args:
        node: The node.
        wiring: What every value before it is, and what it is made of.
        name: What to call the recurrence; unique in the file.
        scope: The path of the If branch it sits in, empty at the top.
        opset: The opset that the model imports.

    Raises:
        Refused: Something that is not read; the message names it.
        LoadError: A weight holds NaN, or does not fit its declared shape.
    """
    loop = _scan(node, opset) if node.op_type == "Scan" else _loop(node)
    return _Walk(loop, wiring, name, scope, opset).read()


def _loop(node: ir.Node) -> Looped:
    body = _body(node)
    count = len(node.inputs) - 2
    if count < 0 or len(body.inputs) != 2 + count or len(body.outputs) < 1 + count:
        raise Refused("its body does not take and give what the Loop carries")
    whole = [*node.outputs]
    return Looped(
        node,
        body,
        _variables(body.inputs[2:], body.outputs[1 : 1 + count], node.inputs[2:], whole[:count]),
        [],
        [Output(o, w) for o, w in zip(body.outputs[1 + count :], whole[count:], strict=False)],
        {body.inputs[0], body.inputs[1]},
        step=body.inputs[0],
        trips=node.inputs[0],
        condition=body.outputs[0],
    )


def _scan(node: ir.Node, opset: int) -> Looped:
    body, old = _body(node), opset < 9
    given = [*node.inputs[1:]] if old else [*node.inputs]
    if old and node.inputs[0] is not None:
        raise Refused("Scan of opset 8 with sequence lengths is not read")
    scanned = int(node.attributes["num_scan_inputs"].as_int())
    count = len(given) - scanned
    if count < 0 or len(body.inputs) != len(given) or len(body.outputs) < count:
        raise Refused("its body does not take and give what the Scan carries")
    stacked = len(body.outputs) - count
    into = _integers(node, "directions" if old else "scan_input_directions", scanned)
    out = _integers(node, "scan_output_directions", stacked)
    along = [1] * scanned if old else _integers(node, "scan_input_axes", scanned)
    written = [1] * stacked if old else _integers(node, "scan_output_axes", stacked)
    along = _from_front(along, body.inputs[count:], given[count:])
    written = _from_front(written, body.outputs[count:], node.outputs[count:])
    sequences = []
    for i in range(scanned):
        whole = given[count + i]
        if whole is None:
            raise Refused("a sequence of the Scan is absent")
        sequences.append(
            Source(body.inputs[count + i], whole, along[i], bool(into[i]), batch=0 if old else None)
        )
    return Looped(
        node,
        body,
        _variables(
            body.inputs[:count], body.outputs[:count], given[:count], [*node.outputs[:count]]
        ),
        sequences,
        [
            Output(entry, whole, time, bool(reverse))
            for entry, whole, time, reverse in zip(
                body.outputs[count:], node.outputs[count:], written, out, strict=False
            )
        ],
        set(),
    )


def _body(node: ir.Node) -> ir.Graph:
    attribute = node.attributes.get("body")
    if attribute is None or attribute.type != ir.AttributeType.GRAPH:
        raise Refused("it has no body")
    return attribute.as_graph()


def _integers(node: ir.Node, name: str, count: int) -> list[int]:
    attribute = node.attributes.get(name)
    found = [0] * count if attribute is None else [int(i) for i in attribute.as_ints()]
    if len(found) != count:
        raise Refused(f"{name} must have {count} entries, got {len(found)}")
    return found


def _from_front(
    axes: list[int], entries: Sequence[ir.Value], wholes: Sequence[ir.Value | None]
) -> list[int]:
    """Count axes of values from the front; an entry has one axis less than the whole."""
    found = []
    for i, given in enumerate(axes):
        whole = wholes[i] if i < len(wholes) else None
        shapes = [(None if whole is None else whole.shape, 0), (entries[i].shape, 1)]
        ranks = [len(shape) + more for shape, more in shapes if shape is not None]
        if given < 0 and not ranks:
            raise Refused(f"its axis {given} is counted from the end of a value of unknown rank")
        found.append(given % ranks[0] if given < 0 else given)
    return found


def _variables(
    before: Sequence[ir.Value],
    after: Sequence[ir.Value],
    start: Sequence[ir.Value | None],
    final: Sequence[ir.Value],
) -> list[Variable]:
    found = []
    for i, (b, a, s) in enumerate(zip(before, after, start, strict=True)):
        if s is None:
            raise Refused("a state of the loop has no start")
        found.append(Variable(b, a, s, final[i] if i < len(final) else None))
    return found


class _Walk:
    """One loop, from its wiring to a recurrence."""

    def __init__(self, loop: Looped, wiring: Wiring, name: str, scope: str, opset: int) -> None:
        self.loop, self.wiring, self.known = loop, wiring, wiring.known
        self.name, self.scope, self.opset = name, scope, opset
        self.fixed = {v.before: v.start for v in loop.variables if resolved(v.after) is v.before}
        for before, start in self.fixed.items():
            self.known.alias(before, start)
        for inner in loop.body:
            self.known.visit(inner)
        self.counters = self._counters()
        self.step = Step(loop.body, {}, (), {})
        self.masked: list[ir.Value] = []
        self.blanked = False
        self.indices = Indices(
            loop.body,
            self.known,
            loop.step,
            self.counters,
            {
                v.before: v.after
                for v in loop.variables
                if v.before in self.counters and v.dtype.value in WIDE
            },
        )

    def read(self) -> Read | None:
        """Return the recurrence, or None where there is none."""
        loop = self.loop
        states = [v for v in loop.variables if self._is_state(v)]
        if not states:
            return None
        for state in states:
            if not state.dtype.is_floating_point():
                raise Refused(f"its state {state.before.name!r} is of type {state.dtype.name}")
        if loop.condition is not None and "state" in self._made_of()[loop.condition]:
            raise Refused("how many steps it takes depends on its own state")
        sources = [*loop.sequences, *([] if loop.sequences else self._counted())]
        states, output = self._ordered(self._open(states, sources))
        sequences = self._used(states, sources)
        if not sequences:
            raise Refused("its steps read no sequence")
        if len({s.reverse for s in sequences if s.time is not None}) > 1:
            raise Refused("it reads one sequence forwards and another backwards")
        return self._placed(states, output, sequences)

    # --- what is memory ---------------------------------------------------------------------

    def _made_of(self, counters: set[ir.Value] | None = None) -> dict[ir.Value, frozenset[str]]:
        """Say of each value whether the steps' number, the state or a sequence is in it."""
        counters = self.counters if counters is None else counters
        kinds: dict[ir.Value, frozenset[str]] = {}
        for variable in self.loop.variables:
            kinds[variable.before] = frozenset(() if variable.before in self.fixed else ("state",))
        kinds.update({s.entry: frozenset({"entry"}) for s in self.loop.sequences})
        kinds.update({value: frozenset({"step"}) for value in counters})
        nothing: frozenset[str] = frozenset()
        for node in self.loop.body:
            inside = nothing.union(*(kinds.get(value, nothing) for value in captured(node)))
            kinds.update(dict.fromkeys(node.outputs, inside))
        for value in self.loop.body.outputs:
            kinds.setdefault(value, nothing)
        return kinds

    def _counters(self) -> set[ir.Value]:
        """Return the whole numbers and truth values that follow from the number of the step."""
        counting = [
            v
            for v in self.loop.variables
            if v.before not in self.fixed and not v.dtype.is_floating_point()
        ]
        while True:
            counters = self.loop.counters | {v.before for v in counting}
            kinds = self._made_of(counters)
            kept = [v for v in counting if kinds[v.after] <= {"step"}]
            if len(kept) == len(counting):
                return counters
            counting = kept

    def _is_state(self, variable: Variable) -> bool:
        if variable.before in self.fixed or variable.before in self.counters:
            return False
        uses = {use.node for use in variable.before.uses()}
        collector = resolved(variable.after).producer()
        collects = collector is not None and collector.op_type in _COLLECTS
        return bool(uses) and not (collects and uses == {collector})

    def _open(self, states: list[Variable], sources: list[Source]) -> list[Variable]:
        """Take masks that compare the step's number with a length to let every step through.

        Returns the states that are left: what only such a mask passed on is none.
        """
        numbers = {s.entry: self._smallest(s.whole) for s in sources if self._numbers(s.whole)}
        numbers |= {counter: self._least(counter) for counter in self.counters}
        entries = {s.entry for s in sources} - numbers.keys()
        self.step = Step(
            self.loop.body,
            {s.before: s.after for s in states},
            entries,
            numbers,
            {s.whole for s in sources},
        )
        self.masked = open_masks(self.step, self.known) or self._blended(states, sources)
        if not self.masked:
            return states
        read = self.step.behind([through(s.after, self.known) for s in states], self.known).given
        return [s for s in states if s.before in read]

    def _least(self, counter: ir.Value) -> int | None:
        """Return where a counter starts that never falls: the step's own number at 0."""
        start = next((v.start for v in self.loop.variables if v.before is counter), None)
        pace = self.indices.pace(counter)
        if pace is None or pace < 0:
            return None
        return 0 if start is None else self._smallest(start)

    def _smallest(self, value: ir.Value) -> int | None:
        stored = self.known.constant(value)
        return int(stored.min()) if stored is not None and stored.size else None

    def _blended(self, states: list[Variable], sources: list[Source]) -> list[ir.Value]:
        """Do so where a mask is multiplied by: if it is one way, the whole state is kept."""
        found = blending(self.step, self.known)
        mask, truth = (None, False) if found is None else found
        if mask is None or mask.producer() is None:
            return []
        sides = [shape_of(self.known, v) for v in mask.producer().inputs]  # type: ignore[union-attr]
        rank = max((len(sizes) for sizes in sides if sizes is not None), default=0)
        self.known.assume(mask, np.full((1,) * rank, not truth))
        try:
            ports = alone(self._ports(states, self._used(states, sources)))
            kept = keeps(trace(*ports, self.known, self.loop.body, opset=self.opset))
        except Refused:
            kept = False
        if not kept:
            self.known.forget(mask)
            return []
        self.known.assume(mask, np.full((1,) * rank, truth))
        return [state.before for state in states]

    def _numbers(self, value: ir.Value) -> bool:
        """Whether the entries of a sequence are the numbers of the steps."""
        stored, node = self.known.constant(value), value.producer()
        for _ in range(DEEPEST):  # a graph may bite its tail
            if node is None or not same_number(node) or node.inputs[0] is None:
                break
            node = node.inputs[0].producer()
        ranged = node is not None and node.op_type == "Range"
        if stored is None or stored.dtype.kind not in "iu" or stored.size < 2:
            return ranged
        steps = np.diff(stored.reshape(-1).astype(np.int64))
        return bool((steps == 1).all() or (steps == -1).all())

    def _ordered(self, states: list[Variable]) -> tuple[list[Variable], Output | None]:
        """Put the state that is the output first, and find where the loop gives it."""
        for output in self.loop.outputs:
            if not _read(output.whole):
                continue
            given = self._given(output.entry)
            for state in states:
                after = through(state.after, self.known)
                if after in given:
                    self.blanked = after is not given[0]
                    return [state, *(s for s in states if s is not state)], output
        outside = [s for s in states if s.final is not None and _read(s.final)]
        if any(_read(output.whole) for output in self.loop.outputs) or not outside:
            return states, None
        return [outside[0], *(s for s in states if s is not outside[0])], None

    def _given(self, entry: ir.Value) -> list[ir.Value]:
        """Return what an output is on sequences of full length, where a mask blanks it after."""
        value = through(entry, self.known)
        node = value.producer()
        if node is None or node.op_type != "Where" or node.inputs[0] is None:
            return [value]
        truth = opened(node.inputs[0], self.step, self.known)
        shown = None if truth is None else node.inputs[1 if truth else 2]
        return [value] if shown is None else [value, through(shown, self.known)]

    # --- what every step reads --------------------------------------------------------------

    def _outside(self, value: ir.Value) -> ir.Value | None:
        """Return the value outside the body that this one always is."""
        value = self._uncut(resolved(value))
        value = self._uncut(resolved(self.fixed[value])) if value in self.fixed else value
        node = value.producer()
        inner = node.graph is self.loop.body if node is not None else False
        return None if inner or value in self.loop.body.inputs else value

    def _uncut(self, value: ir.Value) -> ir.Value:
        """Return the value that this one is, where operators that move entries left all in place.

        PyTorch writes ``x[:, t]`` as a Slice of all rows and a Gather.
        """
        layout = self.known.layout(value)
        whole = None if layout is None else self.known.layout(layout.origin)
        same = layout is not None and whole is not None and layout.axes == whole.axes
        return layout.origin if layout is not None and same else value

    def _counted(self) -> list[Source]:
        """Return what the steps pick out of values by their number."""
        kinds, found = self._made_of(), []
        for node in self.loop.body:
            if node.op_type not in {"Gather", "Slice"} or node.domain not in STANDARD:
                continue
            data, index = node.inputs[0], node.inputs[1]
            if data is None or index is None or "step" not in kinds.get(index, ()):
                continue
            whole = self._outside(data)
            if whole is None or self.known.constant(whole) is not None:
                continue
            slope = self.indices.slope(index)
            if kinds[index] != {"step"} or slope not in {1, -1}:
                raise Refused(f"it reads {whole.name!r} in an order that is not followed")
            if not self._one(node, index):
                raise Refused(f"it is not known to read one entry of {whole.name!r} at each step")
            along, kept = self._along(node, index)
            found.append(Source(node.outputs[0], whole, along, slope < 0, kept))
        return found

    def _one(self, node: ir.Node, index: ir.Value) -> bool:
        """Whether a Gather or Slice is known to pick one entry."""
        sizes = shape_of(self.known, index)
        if sizes is None or any(n != 1 for n in sizes):
            return False
        end = node.inputs[2] if len(node.inputs) > 2 else None
        if node.op_type == "Gather":
            return True
        step = self.known.constant(node.inputs[4]) if len(node.inputs) > 4 else np.ones(1)
        forward = step is not None and bool((step == 1).all())
        return end is not None and forward and self.indices.apart(index, end) == 1

    def _along(self, node: ir.Node, index: ir.Value) -> tuple[int, bool]:
        """Return the axis that a Gather or Slice picks from, and whether it stays."""
        if node.op_type == "Gather":
            attribute = node.attributes.get("axis")
            rank = shape_of(self.known, index)
            kept = rank is not None and len(rank) > 0
            return self._front(node, 0 if attribute is None else int(attribute.as_int())), kept
        axes = self.known.constant(node.inputs[3]) if len(node.inputs) > 3 else np.zeros(1)
        if axes is None or axes.size != 1:
            raise Refused("it cuts entries out of a sequence along several axes")
        return self._front(node, int(axes.reshape(-1)[0])), True

    def _front(self, node: ir.Node, along: int) -> int:
        """Count an axis of what a node picks from from the front, where its rank is known."""
        data = node.inputs[0]
        sizes = None if data is None else shape_of(self.known, data)
        return along if along >= 0 or not sizes else along % len(sizes)

    def _used(self, states: list[Variable], sequences: list[Source]) -> list[Source]:
        """Return the sequences that reach the state, and values that every step reads whole."""
        stops = {s.before for s in states} | {s.entry for s in sequences}
        found = region([s.after for s in states], stops, self.known, self.loop.body)
        held = []
        for value in found.loose:
            if value in self.counters:
                raise Refused("its state depends on the number of the step")
            outside = self._outside(value)
            if outside is None:
                raise Refused(f"its state depends on {value.name!r}, which no step gives it")
            held.append(Source(value, outside, None))
        used = [s for s in sequences if s.entry in found.given]
        used.sort(key=lambda s: s.whole.dtype == ir.DataType.BOOL)
        return [*used, *held] if used else []

    # --- what becomes of it -----------------------------------------------------------------

    def _placed(
        self, states: list[Variable], output: Output | None, sequences: list[Source]
    ) -> Read:
        """Trace the step and say where it sits among the graph's values."""
        carried, entering = alone(self._ports(states, sequences))
        finals = [s.final is not None and _read(s.final) for s in states]
        outputs = 1 if output is not None or finals[0] else len(states)

        def make(given: Ports) -> TracedCell:
            return trace(*given, self.known, self.loop.body, opset=self.opset, outputs=outputs)

        cell = make((carried, entering))
        keep_apart(cell, lambda lengths: self._ports(states, sequences, lengths), make)
        state, findings = initial_state(
            [(s.start, c.shape) for s, c in zip(states, carried, strict=True)],
            self.wiring,
            self.name,
        )
        reverse = next(s.reverse for s in sequences if s.time is not None)
        x, time, batch = self._axes(sequences)
        node = self.loop.node
        layer = Layer(
            (Recurrence(self.name, 0, cell, state, reverse, self._ended),),
            Site(
                node=node.name or self.name,
                x=sequences[0].whole.name or "",
                layout=int(sequences[0].time == 1),
                scope=self.scope,
                reads=tuple(
                    self._reading(s, e.shape) for s, e in zip(sequences, entering, strict=True)
                ),
                carries=tuple(
                    (s.start.name or "", s.final.name or "") for s in states if s.final is not None
                ),
                outlets=self._outlets(states, output, sequences, time, state),
            ),
        )
        units = axis(Atom(f"{self.name}:units", cell.hidden_size))
        y = None if output is None else output.whole
        if y is not None and output is not None and len(carried[0].shape) == 2:
            over = time if output.reverse == reverse and self._full(time) else self._fresh("steps")
            axes = (batch, over, units) if output.time == 1 else (over, batch, units)
            self.known.track(y, Layout(y, axes))
            self.known.recurrent.add(y)
        last = states[0].final
        return Read(
            layer,
            node,
            x,
            y,
            time,
            batch,
            units,
            plain_name(states[0].dtype.name.lower()),
            (
                self._note(states, sequences),
                *self._holds(states),
                *self._fixed(sequences),
                *findings,
            ),
            frozenset() if last is None else frozenset({last}),
        )

    def _ports(
        self, states: list[Variable], sequences: list[Source], lengths: Sequence[int] = ()
    ) -> Ports:
        """Return what a step carries and reads, given lengths of axes that the run decides."""
        shapes = [for_one(self.known, s.before, s.start, s.after, lengths=lengths) for s in states]
        return (
            [Carried(s.before, s.after, n) for s, n in zip(states, shapes, strict=True)],
            [
                Entering(
                    s.entry,
                    self._entry_shape(s, lengths),
                    s.whole.dtype,
                    int(s.kept and s.time == 0),
                )
                for s in sequences
            ],
        )

    def _outlets(
        self,
        states: list[Variable],
        output: Output | None,
        sequences: list[Source],
        time: Axis,
        state: InitialState,
    ) -> Outlets:
        """Say which values a node in the place of the loop would give, and what forbids one."""
        finals = [s.final if s.final is not None and _read(s.final) else None for s in states]
        given = {*finals, None if output is None else output.whole}
        more = [v.name or "a value" for v in self.loop.node.outputs if _read(v) and v not in given]
        first, obstacle = sequences[0], ""
        if len(sequences) > 1 or first.kept or first.time not in {0, 1}:
            obstacle = "reads more than one sequence [time, batch, features]"
        elif self.masked:
            obstacle = "keeps its state past the end of a sequence"
        elif self.blanked:
            obstacle = "gives other outputs past the end of a sequence"
        elif state.source == "computed":
            obstacle = "starts from a state that the graph computes"
        elif more:
            obstacle = f"gives {listed(more)} beside its state"
        elif output is not None and output.reverse != first.reverse:
            obstacle = "gives its outputs in another order than it reads"
        elif not self._in_order(first, time):
            obstacle = "is not known to take one step for every entry of its sequence"
        return Outlets(
            "" if output is None else output.whole.name or "",
            0 if output is None else output.time,
            tuple("" if final is None else final.name or "" for final in finals),
            obstacle and f"its {self.loop.node.op_type} {obstacle}",
        )

    def _entry_shape(self, source: Source, lengths: Sequence[int]) -> tuple[int, ...]:
        """Return what one step reads of a source, given lengths of axes that the run decides."""
        sizes = shape_of(self.known, source.whole)
        if sizes is None:
            return for_one(self.known, source.entry, lengths=lengths)
        if source.time is not None:
            along = source.time % max(1, len(sizes))
            sizes[along] = 1
        gone = {source.batch, None if source.kept or source.time is None else along}
        return filled([n for i, n in enumerate(sizes) if i not in gone], lengths)

    def _reading(self, source: Source, entry: tuple[int, ...]) -> Reading:
        """Say along which axes a value is read; the first that is left is that of sequences."""
        hidden = [a for a in (source.batch, None if source.kept else source.time) if a is not None]
        rank = len(entry) + len(hidden)
        time = None if source.time is None else source.time % rank
        left = [i for i in range(rank) if i != time]
        batch = source.batch if source.batch is not None else left[0] if len(left) > 1 else None
        return Reading(source.whole.name or "", time, batch)

    def _axes(self, sequences: list[Source]) -> tuple[Layout, Axis, Axis]:
        """Return the axes of a lone sequence [T, N, I] or [N, T, I]; unknown ones otherwise."""
        first = sequences[0]
        layout = self.known.layout(first.whole, rank=3)
        if len(sequences) == 1 and layout is not None and not first.kept and first.time in {0, 1}:
            time, batch = layout.axes[first.time], layout.axes[1 - first.time]
            return layout, time, batch
        parts = self._fresh("time"), self._fresh("batch"), self._fresh("features")
        return Layout(ir.Value(name=f"{self.name}:x"), parts), parts[0], parts[1]

    def _fresh(self, what: str) -> Axis:
        return axis(Atom(f"{self.name}:{what}"))

    def _full(self, time: Axis) -> bool:
        """Whether the loop is known to run once for every entry of its sequence."""
        if self.loop.node.op_type == "Scan":
            return True
        trips, steps = self.known.content(self.loop.trips), length(time)
        return isinstance(trips, np.ndarray) and trips.size == 1 and trips.item() == steps

    def _in_order(self, source: Source, time: Axis) -> bool:
        """Whether every entry of a sequence is known to be read once, first or last one first."""
        if self.loop.node.op_type == "Scan":
            return True
        gather, steps = source.entry.producer(), length(time)
        index = None if gather is None else gather.inputs[1]
        if index is None or not self._full(time):
            return False
        counting = self._counting()
        wanted = steps - 1 if source.reverse and isinstance(steps, int) else 0
        if counting.value(index) != wanted or (source.reverse and not isinstance(steps, int)):
            return False
        return self.loop.node.inputs[1] is None or self._goes_on(counting, steps)

    def _goes_on(self, counting: Counting, steps: Size | int) -> bool:
        """Whether the condition allows every step; each step's allows the one after it."""
        go_on, condition = self.loop.body.inputs[1], self.loop.condition
        stored = self.known.constant(condition)
        held = stored is not None and bool(stored.all())
        if held or (condition is not None and resolved(condition) is go_on):
            return counting.value(go_on) == 1
        if not isinstance(steps, int):
            return False
        for _ in range(steps):
            if counting.value(go_on) != 1:
                return False
            counting.advance()
        return True

    def _counting(self) -> Counting:
        step, go_on = self.loop.body.inputs[:2]
        counted = [v for v in self.loop.variables if v.before in self.counters]
        starts = {v.before: v.start for v in counted}
        sequels = {v.before: v.after for v in counted}
        first, condition = self.loop.node.inputs[1], self.loop.condition
        if condition is not None:
            sequels[go_on] = condition
        if first is not None:
            starts[go_on] = first
        return Counting(self.known, step, starts, sequels)

    def _note(self, states: list[Variable], sequences: list[Source]) -> Finding:
        carries = " and ".join(repr(s.before.name) for s in states)
        reads = " and ".join(
            repr(s.whole.name) + (" at every step" if s.time is None else f" along axis {s.time}")
            for s in sequences
        )
        op = self.loop.node.op_type
        return finding("RA130", self.name, f"the {op} carries {carries} and reads {reads}")

    def _fixed(self, sequences: list[Source]) -> list[Finding]:
        """Say that the graph fixes how many entries there are, or how many steps are taken."""
        first = next(s for s in sequences if s.time is not None)
        found = fixed_steps(self.known, first.whole, first.time or 0, self.name)
        trips = self.known.constant(self.loop.trips)
        most = int(trips.item()) if trips is not None and trips.size == 1 else 0
        if found or not 1 < most < LONGEST:
            return found
        text = f"the graph takes at most {most} steps; what is proved holds for any"
        return [finding("RA126", self.name, text)]

    @property
    def _ended(self) -> str:
        """What the file computes otherwise, where masks were taken to let every step through."""
        if self.masked:
            return "its steps past the end of a sequence keep the state"
        return "its outputs past the end of a sequence are others" if self.blanked else ""

    def _holds(self, states: list[Variable]) -> list[Finding]:
        """Warn of states that a condition passes on unchanged."""
        held, found = [], []
        if self.masked:
            names = " and ".join(repr(value.name) for value in self.masked)
            text = (
                f"{names} kept as before where the step's number is past a length: audited as on "
                "sequences of full length, where it never is"
            )
            found.append(finding("RA131", self.name, text))
        for state in states:
            node = resolved(state.after).producer()
            if node is not None and node.op_type == "Where" and state.before not in self.masked:
                kept = [v for v in node.inputs[1:] if v is not None and resolved(v) is state.before]
                held += [repr(state.before.name)] if kept else []
        if held:
            text = (
                f"{' and '.join(held)} kept as before where a mask says so: such steps forget "
                "nothing"
            )
            found.append(finding("RA131", self.name, text))
        return found


def _read(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()
