"""What each recurrence sees: the data's or synthetic inputs, brought to every layer.

A measured number belongs to the inputs it was measured on. For a PyTorch stack those are
the sequences themselves, and below the first layer the outputs of the layer before; for
an ONNX graph the part of the graph before a recurrence is run, so that a layer behind a
convolution is measured on what the convolution gives it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rnnaudit import cells, runtime
from rnnaudit.data import UNNAMED, Data, InputRange, fitting_width, turned_at
from rnnaudit.errors import LoadError
from rnnaudit.estimators.probes import KINDS, synthetic_within
from rnnaudit.findings import finding
from rnnaudit.model import Model, Reading, Site, Stack
from rnnaudit.reports.numbers import counted
from rnnaudit.results import Finding
from rnnaudit.verification.calls import by_step, in_steps, over_calls, stepped
from rnnaudit.verification.inputs import Feed, data_feeds, probe_feeds
from rnnaudit.verification.slots import of_graph

if TYPE_CHECKING:
    import onnx_ir as ir

SEQUENCES, FEWER = 35, 15
"""Synthetic sequences: seven of each kind, or three where a model is large."""

LENGTH = 256

LARGE = 350_000
"""Multiplications per step of all recurrences, above which a model is large.

From there on depths up to `LENGTH` on `SEQUENCES` of them take minutes: 4e11 multiplications.
"""

MOST_ROWS = 256
"""Rows of a layer's batch axis (frequency bands, say) that are measured, all sequences together."""

Owner = tuple[int, int]
"""A sequence: the feed it came in, and its row there."""

FEW_IN_STEPS = 10
"""Synthetic sequences for a graph that takes one step of one sequence per call."""

SHORTEST = 8
"""Steps below which a sequence says nothing of memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """Inputs of every stack and every recurrence, in groups of equal length.

    Attributes:
        stacks: Inputs [N, T, I] of each stack's first layer, by the stack's position.
        recurrences: Inputs [N, T, I] by ``Recurrence.label``, aligned with time.
        owners: The sequence that each row [N] belongs to, for each group of each stack: a
            graph may read one sequence as many rows, which are not independent.
        sources: Where in the data each sequence stands, by the stack's position, in the order
            of the numbers in ``owners``.
        synthetic: Whether the inputs were made up, by the stack's position.
        kinds: The kind of each synthetic sequence, by the stack's position; empty for data.
        description: What a report says of the inputs.
        findings: What could not be measured as asked.
        steps: How many steps the graph gives each stack, whatever it is given, by the stack's
            position; None where that depends on what it is given.
        guessed: Whether nothing is known of what the graph gives a stack, by its position: its
            inputs were made up for it alone.
    """

    stacks: tuple[tuple[Tensor, ...], ...]
    recurrences: Mapping[str, tuple[Tensor, ...]]
    owners: tuple[tuple[Tensor, ...], ...]
    sources: tuple[tuple[int, ...], ...]
    synthetic: tuple[bool, ...]
    kinds: tuple[tuple[str, ...], ...]
    description: str
    findings: tuple[Finding, ...] = ()
    steps: tuple[int | None, ...] = ()
    guessed: tuple[bool, ...] = ()

    @property
    def whole(self) -> tuple[bool, ...]:
        """Whether each stack can be given no longer sequences than are here, by its position."""
        return tuple(
            {x.shape[1] for x in groups} == {steps}
            for groups, steps in zip(self.stacks, self.steps, strict=True)
        )

    @property
    def lengths(self) -> Mapping[str, int]:
        """The longest sequence that each recurrence was seen to read, by its label."""
        seen = self.recurrences.items()
        return {label: max(x.shape[1] for x in groups) for label, groups in seen if groups}


def observe(
    model: Model,
    data: Data | None,
    *,
    seed: int,
    input_range: InputRange | None = None,
    sequences: int | None = None,
    length: int = LENGTH,
) -> Observation:
    """Bring the data, or synthetic inputs where there are none, to every recurrence.

    Raises:
        LoadError: The data do not fit the width of the model's input.
    """
    sequences = sequences or _fitting(model)
    fixed: Mapping[int, int] = {}
    if model.graph is not None and not (model.whole and data is None):
        given, findings, fixed = _captured(
            model, data, seed=seed, input_range=input_range, sequences=sequences, length=length
        )
    else:
        given, findings = _given(model, data)
        if model.graph is not None:
            fixed = _fixed(model)
    every = range(len(model.stacks))
    made_up = tuple(i not in given or data is None for i in every)
    steps = [fixed.get(i, length) for i in every]
    rows = _filled_up(
        model,
        given,
        seed,
        input_range=input_range,
        sequences=sequences,
        lengths=[min(length, n) if n >= SHORTEST else length for n in steps],
    )
    described = _description(data if given else None, rows, made_up)
    found = _observation(model, rows, made_up, described, findings)
    return replace(
        found,
        steps=tuple(fixed.get(i) for i in every),
        guessed=tuple(not model.direct and i not in given for i in every),
    )


def observe_rows(
    model: Model,
    read: Mapping[str, Sequence[tuple[Owner, Tensor]]],
    description: str,
    *,
    seed: int,
    input_range: InputRange | None = None,
) -> Observation:
    """Take what stacks of a live module were seen to read, and synthetic inputs for the others.

    Args:
        model: The model.
        read: By the stack's name, rows [T, I] in float64, each with the sequence it belongs to.
        description: What a report says of these inputs.
        seed: Of the synthetic inputs.
        input_range: Their bounds.
    """
    given = {i: _Rows.of(read[s.name]) for i, s in enumerate(model.stacks) if read.get(s.name)}
    made_up = tuple(i not in given for i in range(len(model.stacks)))
    findings = tuple(
        _not_seen(stack.name, "the module did not run it")
        for stack, new in zip(model.stacks, made_up, strict=True)
        if new
    )
    rows = _filled_up(model, given, seed, input_range=input_range)
    return _observation(model, rows, made_up, description, findings)


def _fitting(model: Model) -> int:
    """Return how many synthetic sequences suit the size of a model."""
    step = cells.multiplications(*(r.cell for r in model.recurrences()))
    return FEWER if step > LARGE else SEQUENCES


def _filled_up(
    model: Model,
    given: Mapping[int, _Rows],
    seed: int,
    *,
    input_range: InputRange | None,
    sequences: int | None = None,
    lengths: Sequence[int] | None = None,
) -> list[_Rows]:
    """Return the rows of every stack: those given, else synthetic ones of ``lengths``."""
    lengths = lengths or [LENGTH] * len(model.stacks)
    return [
        given[i]
        if i in given
        else _Rows.single(
            _made_up(stack, sequences or _fitting(model), lengths[i], seed + i, input_range)
        )
        for i, stack in enumerate(model.stacks)
    ]


def _observation(
    model: Model,
    stacks: Sequence[_Rows],
    made_up: tuple[bool, ...],
    description: str,
    findings: tuple[Finding, ...],
) -> Observation:
    seen: dict[str, tuple[Tensor, ...]] = {}
    for stack, rows in zip(model.stacks, stacks, strict=True):
        seen.update(_through(stack, rows.groups))
    return Observation(
        tuple(rows.groups for rows in stacks),
        seen,
        tuple(rows.owners for rows in stacks),
        tuple(rows.sources for rows in stacks),
        made_up,
        tuple(rows.kinds() if new else () for rows, new in zip(stacks, made_up, strict=True)),
        description,
        findings,
        (None,) * len(model.stacks),
        (False,) * len(model.stacks),
    )


def _description(data: Data | None, stacks: Sequence[_Rows], made_up: Sequence[bool]) -> str:
    """Say what was measured on; of synthetic inputs also how large they are."""
    if data is not None:
        return data.describe()
    if not stacks:
        return "no sequences: nothing could be measured"
    sequences = min(int(rows.owners[-1].max()) + 1 for rows in stacks)
    length = max(x.shape[1] for rows in stacks for x in rows.groups)
    largest = max(
        (
            float(x.abs().max())
            for rows, new in zip(stacks, made_up, strict=True)
            if new
            for x in rows.groups
        ),
        default=0.0,
    )
    return f"{sequences} synthetic sequences of {length} steps, |x| up to {largest:.3g}"


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Rows [N, T, I] in groups of equal length, the sequence that each belongs to, and its place.

    ``sources`` holds, for each sequence, where it stood in what was fed.
    """

    groups: tuple[Tensor, ...]
    owners: tuple[Tensor, ...]
    sources: tuple[int, ...]

    @classmethod
    def single(cls, x: Tensor) -> _Rows:
        """Return rows that are sequences of their own."""
        return cls((x,), (torch.arange(len(x)),), tuple(range(len(x))))

    @classmethod
    def of(cls, rows: Sequence[tuple[Owner, Tensor]]) -> _Rows:
        """Group rows [T, I], each with its sequence, by their length, shortest first."""
        groups, owners, sources = [], [], list[int]()
        for T in sorted({len(x) for _, x in rows}):
            chosen = [(owner, x) for owner, x in rows if len(x) == T]
            numbers = {owner: n for n, owner in enumerate(dict.fromkeys(o for o, _ in chosen))}
            groups.append(torch.stack([x for _, x in chosen]))
            owners.append(torch.tensor([len(sources) + numbers[owner] for owner, _ in chosen]))
            sources += [fed for fed, _ in numbers]
        return cls(tuple(groups), tuple(owners), tuple(sources))

    def kinds(self) -> tuple[str, ...]:
        """Name the kind of each synthetic sequence; empty where they have several lengths."""
        if len(self.groups) > 1:
            return ()
        return tuple(KINDS[n % len(KINDS)] for n in range(int(self.owners[0].max()) + 1))


def _made_up(
    stack: Stack,
    sequences: int,
    length: int,
    seed: int,
    input_range: InputRange | None,
) -> Tensor:
    """Return synthetic inputs [N, T, I], within the range where one is given."""
    return synthetic_within(
        stack.input_size, sequences=sequences, length=length, seed=seed, input_range=input_range
    )


def _through(stack: Stack, groups: Sequence[Tensor]) -> dict[str, tuple[Tensor, ...]]:
    """Run each layer in full, so that the next one sees what it would see."""
    seen = {}
    for layer in stack.layers:
        for recurrence in layer.recurrences:
            seen[recurrence.label] = tuple(groups)
        if layer is not stack.layers[-1]:
            groups = [cells.run_layer(layer, x) for x in groups]
    return seen


def _given(model: Model, data: Data | None) -> tuple[dict[int, _Rows], tuple[Finding, ...]]:
    """Give the data to the stack that they fit."""
    if data is None:
        return {}, ()
    name = _of_all(data)
    width = data.width(name)
    fitting = [i for i, stack in enumerate(model.stacks) if stack.input_size == width]
    if not fitting:
        widths = sorted({stack.input_size for stack in model.stacks})
        wanted = " or ".join([*map(str, widths[:-1]), counted(widths[-1], "feature")])
        raise LoadError(
            f"the data must have {wanted} per step, got {width} from {data.source}",
            help=_of_that_width(model, data, name, widths),
            id="RA107",
        )
    rows = _Rows.of(
        [((n, 0), torch.as_tensor(x, dtype=torch.float64)) for n, x in enumerate(data.inputs[name])]
    )
    if len(model.stacks) == 1:
        return {0: rows}, ()
    note = finding(
        "RA207",
        model.stacks[fitting[0]].name,
        f"the data were given to {model.stacks[fitting[0]].name}; "
        "the other stacks were measured on synthetic inputs",
    )
    return {fitting[0]: rows}, (note,)


def _of_that_width(model: Model, data: Data, name: str, widths: Sequence[int]) -> str:
    """Say how to give data that fit: a layer need not read what its model does."""
    turned = next((width for width in widths if turned_at(data, name, width)), None)
    if model.whole or turned is not None:
        return fitting_width(data, name, turned)
    stacks = " or ".join(stack.name for stack in model.stacks[:3])
    return (
        f"give sequences [time, features] of what {stacks} itself reads, or audit an ONNX export "
        "of the model, which takes the model's own inputs"
    )


def _of_all(data: Data) -> str:
    """Return the key of the sequences for a model whose input has no name.

    Raises:
        LoadError: There are several keys, and none of them is ``x``.
    """
    if len(data.inputs) == 1:
        return next(iter(data.inputs))
    for name in (UNNAMED, "x"):
        if name in data.inputs:
            return name
    raise LoadError(
        f"the data must have one key, or name one x, got {', '.join(sorted(data.inputs))} "
        f"from {data.source}",
        help="the inputs of a model without a graph have no names: name its sequences x",
        id="RA107",
    )


def _captured(
    model: Model,
    data: Data | None,
    *,
    seed: int,
    input_range: InputRange | None,
    sequences: int,
    length: int,
) -> tuple[dict[int, _Rows], tuple[Finding, ...], Mapping[int, int]]:
    """Run the graph and keep what its recurrent nodes read; tell where the steps are fixed."""
    slots = of_graph(model, runtime.describe(model.runnable()))
    states = by_step(model, slots)
    calls = None
    if states:
        slots = tuple(stepped(slot, states) for slot in slots)
        calls = in_steps(slots, states, last=False)
        if any(slot.fixed("batch") == 1 for slot in slots):
            sequences = min(sequences, FEW_IN_STEPS)
    if data is not None:
        feeds = data_feeds(slots, data, seed)
    else:
        feeds = probe_feeds(slots, sequences, length, seed, input_range)
    # The runtime gives out no values from inside a branch.
    sites = [
        site if site is not None and not site.scope else None
        for site in (stack.layers[0].site for stack in model.stacks)
    ]
    fetch = [name for site in sites if site is not None for name in _values(site)]
    given_each = [feed.values for feed in feeds]
    outcome = runtime.run(model.runnable(inside=True), given_each, fetch=fetch, calls=calls)
    if outcome.outputs is None and data is not None:
        raise LoadError(
            f"the data must be what the graph takes, got {data.source}: {outcome.error}",
            help="look at the values and the steps of the sequences",
            id="RA107",
        )
    if outcome.outputs is None:
        reason = f"the graph did not run ({outcome.error})"
        return {}, (_not_seen("every recurrence", reason),), {}
    given: dict[int, _Rows] = {}
    findings = []
    for i, (stack, site) in enumerate(zip(model.stacks, sites, strict=True)):
        if site is None:
            findings.append(_not_seen(stack.name, "it sits in a branch of the graph"))
            continue
        if calls is not None and site.reads:
            findings.append(_not_seen(stack.name, "the graph takes one step per call"))
            continue
        captured: Sequence[Mapping[str, NDArray[np.generic]]] = outcome.outputs
        if calls is not None:
            captured = [{site.x: over_calls(f[site.x], site.layout)} for f in captured]
        rows, left = _owned([_batch(found, site) for found in captured], feeds)
        steps = max(len(x) for _, x in rows)
        if steps < SHORTEST:
            reason = f"the graph gives it {counted(steps, 'step')} per call"
            findings.append(_not_seen(stack.name, reason))
        elif not all(bool(x.isfinite().all()) for _, x in rows):
            findings.append(_not_seen(stack.name, "the graph gives it NaN or infinity"))
        else:
            given[i] = _Rows.of(rows)
            if left:
                shown = f"{len(rows)} of {len(rows) + left} rows of its batch axis were measured"
                findings.append(finding("RA212", stack.name, shown))
    return given, tuple(findings), _fixed(model, calls is not None)


def _fixed(model: Model, by_call: bool = False) -> Mapping[int, int]:
    """Return the steps that each stack reads whatever the graph is given, by its position.

    A stack whose state the caller carries, or whose one step per call continues the last one,
    reads any number of them.
    """
    axes: dict[int, tuple[str, int]] = {}
    for i, stack in enumerate(model.stacks):
        site = stack.layers[0].site
        own = all(r.initial.source in ("zero", "constant") for r in stack.recurrences())
        if site is None or site.scope or not own:
            continue
        for reading in site.reads:
            if reading.time is not None:
                axes[i] = (reading.value, reading.time)
        if not site.reads:
            axes[i] = (site.x, site.layout)
    known = runtime.sizes(model.runnable(inside=True)) if axes else {}
    found = {i: known[name][axis] for i, (name, axis) in axes.items() if name in known}
    return {i: n for i, n in found.items() if n is not None and not (by_call and n == 1)}


def _owned(
    batches: Sequence[Tensor], feeds: Sequence[Feed]
) -> tuple[list[tuple[Owner, Tensor]], int]:
    """Return rows [T, I] with the sequence each belongs to, and how many were left out.

    Where the layer reads as many rows as were fed, each is a sequence; otherwise all rows of
    a feed are one. Whole sequences are kept while there is room, then part of the first.
    """
    rows: list[tuple[Owner, Tensor]] = []
    total = 0
    for number, (batch, feed) in enumerate(zip(batches, feeds, strict=True)):
        as_fed = len(batch) == feed.tried.batch
        # A fixed batch is filled with copies of the user's sequence: one is enough.
        kept = batch[:1] if as_fed and feed.own else batch
        total += len(kept)
        if rows and len(rows) + len(kept) > MOST_ROWS:
            continue
        each = range(len(kept)) if as_fed else [0] * len(kept)
        rows += [((number, n), x) for n, x in zip(each, kept, strict=True)][:MOST_ROWS]
    return rows, total - len(rows)


def _not_seen(where: str, reason: str) -> Finding:
    return finding(
        "RA210", where, f"{reason}, so {where} was measured on synthetic inputs of its own"
    )


def _values(site: Site) -> tuple[str, ...]:
    """Name what a layer reads."""
    return tuple(reading.value for reading in site.reads) or (site.x,)


def _batch(found: Mapping[str, NDArray[np.generic]], site: Site) -> Tensor:
    """Bring what was captured, [T, N, I] or [N, T, I] with layout 1, to [N, T, I] in float64."""
    if not site.reads:
        x = _exact(found[site.x])
        return x if site.layout == 1 else x.transpose(0, 1).contiguous()
    parts = [_entries(_exact(found[reading.value]), reading) for reading in site.reads]
    N, T = (max(part.shape[i] for part in parts) for i in (0, 1))
    return torch.cat([part.expand(N, T, -1) for part in parts], dim=-1)


def _exact(found: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(found.astype(np.float64)))


def _entries(value: Tensor, reading: Reading) -> Tensor:
    """Bring one value to [N, T, features], with T or N = 1 where it has no such axis."""
    front = [axis for axis in (reading.batch, reading.time) if axis is not None]
    value = value.movedim(front, list(range(len(front))))
    if reading.batch is None:
        value = value.unsqueeze(0)
    if reading.time is None:
        value = value.unsqueeze(1)
    return value.flatten(2) if value.ndim > 2 else value.unsqueeze(2)


def vocabulary(model: Model, stack: Stack) -> Tensor | None:
    """Return all inputs [V, I] of a stack that reads an embedding or a graph's one-hot vectors.

    None where anything but a change of layout stands between the two.
    """
    site = stack.layers[0].site
    if model.graph is None or site is None or site.reads or site.scope:
        return None
    graph = model.graph.graph
    value = next((v for node in graph for v in node.outputs if v.name == site.x), None)
    node = None if value is None else value.producer()
    while node is not None and node.op_type in ("Identity", "Transpose", "Squeeze", "Unsqueeze"):
        value = node.inputs[0]
        node = None if value is None else value.producer()
    if node is not None and node.op_type == "OneHot":
        return _one_hot(node, stack.input_size)
    if node is None or node.op_type != "Gather" or node.attributes.get_int("axis", 0) != 0:
        return None
    table = node.inputs[0]
    if table is None or not table.is_initializer() or table.const_value is None:
        return None
    rows = _exact(table.const_value.numpy())
    return rows if rows.shape[1:] == (stack.input_size,) else None


def _one_hot(node: ir.Node, width: int) -> Tensor | None:
    """Return what a OneHot node can give along its last axis; None where that is not known."""
    values = node.inputs[2]
    if values is None or values.const_value is None or node.attributes.get_int("axis", -1) != -1:
        return None
    off, on = _exact(values.const_value.numpy())
    return torch.where(torch.eye(width) > 0, on, off)
