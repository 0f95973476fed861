"""Which form each truncated layer is written in: what was asked for, or what costs least."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rnnaudit.errors import UnsupportedModelError, UsageError
from rnnaudit.export.costs import CALL, Costs
from rnnaudit.export.filter import MOST_TAPS, linear_map
from rnnaudit.export.layers import reach
from rnnaudit.export.reads import Readers
from rnnaudit.export.sockets import socket
from rnnaudit.export.stepwise import finals, with_past
from rnnaudit.model import Layer, Model, Recurrence
from rnnaudit.reports.numbers import near
from rnnaudit.truncation import ALIKE, AUTO, Form, FormName, Shape

STEPS = 1024
"""Length of the sequences that a cost is counted for, where nothing tells it."""


def choose(
    model: Model,
    depths: Mapping[str, int],
    shape: Shape = AUTO,
    lengths: Mapping[str, int] | None = None,
) -> Mapping[str, Form]:
    """Choose the form of every layer whose directions all have a depth.

    ``auto`` takes ``last`` where the graph reads only final steps of a layer's outputs, and
    else what costs least for one sequence of the length that is expected: ``window``, ``chunk``,
    or for linear cells ``filter``.

    Args:
        model: The model as loaded.
        depths: Truncation depth by ``Recurrence.label``.
        shape: What is wanted; its ``steps`` go before ``lengths``.
        lengths: Length of the sequences that a recurrence was seen to read, by its label.

    Returns:
        The form by the label of the layer's first recurrence.

    Raises:
        UsageError: A window is wanted with recurrent operators, or a form of what streams.
        UnsupportedModelError: ``last`` is wanted of a layer whose other outputs are read, or
            ``filter`` of one that is not linear.
    """
    form, keep_ops = shape.form, shape.keep_ops
    if form in ("window", "filter") and keep_ops:
        raise UsageError(
            f"recurrent operators are kept in the forms chunk and last, got --form {form}",
            help="leave out --keep-ops, or --form",
        )
    forms: dict[str, Form] = {}
    reaches: dict[str, int] = {}
    buffered = with_past(model) if shape.streaming else ()
    single = {} if shape.streaming else finals(model, depths)
    layers = [layer for stack in model.stacks for layer in stack.layers]
    chosen = [layer for layer in layers if all(r.label in depths for r in layer.recurrences)]
    if form != "auto" and chosen and all(layer in buffered for layer in chosen):
        raise UsageError(
            f"--streaming is a form of its own, got --form {form} too",
            help="leave out one of them",
        )
    for layer in _backwards(model, layers):
        if any(r.label not in depths for r in layer.recurrences):
            continue
        label = layer.recurrences[0].label
        steps = shape.steps or (lengths or {}).get(label, STEPS)
        if layer in buffered:
            why = f"it keeps its last {depths[label] - 1} inputs from call to call"
            buffer = Form("chunk", 1, keep_ops, past=True, why=why)
            forms[label] = _priced(layer, buffer, depths, depths[label], 1)
            continue
        if label in single:
            forms[label] = _last(layer, depths, single[label], 1, keep_ops=keep_ops)
            continue
        final = _final_steps(model, layer, reaches)
        if form in ("auto", "last") and final is not None:
            forms[label] = _last(layer, depths, max(1, final), steps, keep_ops=keep_ops)
            if layer.site is not None and (final or not _reverse(layer)):
                reaches[layer.site.node] = reach(layer, depths, max(1, final))
        elif form == "last":
            raise UnsupportedModelError(
                f"the form last needs a graph that reads only the final outputs of a layer, got "
                f"{label}, whose other outputs are read too",
                help="choose --form chunk",
            )
        elif form == "filter":
            forms[label] = _priced(layer, _filter(model, layer, depths), depths, steps, steps)
        else:
            forms[label] = _cheapest(model, layer, depths, shape, steps)
    return {r: forms[r] for layer in layers if (r := layer.recurrences[0].label) in forms}


def _backwards(model: Model, layers: list[Layer]) -> list[Layer]:
    """Order layers such that one comes after all that read its output."""
    if model.graph is None:
        return layers[::-1]
    names = [node.name for node in model.graph.graph.all_nodes()]
    return sorted(layers, key=lambda layer: -names.index(layer.site.node if layer.site else ""))


def _reverse(layer: Layer) -> bool:
    return any(r.reverse for r in layer.recurrences)


def _final_steps(model: Model, layer: Layer, reaches: Mapping[str, int]) -> int | None:
    """Return of how many final steps the outputs are read: 0 if the final states are all.

    None where more may be read; a reverse direction's final state is that of the first step.
    """
    if model.graph is None or layer.site is None:
        return None
    at = socket(model.graph.graph, layer.site)
    steps, *finals = at.outputs
    final = 0 if steps is None else Readers(reaches).final_steps(steps, at.time, at.rank)
    states = any(v is not None and (v.uses() or v.is_graph_output()) for v in finals)
    return None if final and states and _reverse(layer) else final


def _last(
    layer: Layer, depths: Mapping[str, int], final: int, before: int, *, keep_ops: bool
) -> Form:
    """Return the last form; the recurrence runs over ``before`` steps."""
    steps = reach(layer, depths, final)
    deepest = max(layer.recurrences, key=lambda r: depths[r.label])
    block = Costs(deepest.cell, depths[deepest.label]).best_block(steps)
    read = "step is" if final == 1 else f"{final} steps are"
    why = f"only the final {read} read: {steps} steps of input suffice"
    form = Form("last", min(block, final), keep_ops, final, why=why)
    return _priced(layer, form, depths, min(steps, before) if before > 1 else steps, before)


def _priced(layer: Layer, form: Form, depths: Mapping[str, int], steps: int, before: int) -> Form:
    """Estimate what a form costs over ``steps``, and the recurrence over the ``before`` it reads.

    Nothing is estimated of a recurrence that was no operator.
    """
    costs = [Costs(r.cell, depths[r.label], form.keep_ops) for r in layer.recurrences]
    if form.name == "window":
        cost = sum(c.window(steps) for c in costs)
    elif form.name == "filter":
        cost = sum(c.filter(steps) for c in costs)
    else:
        cost = sum(c.chunk(steps, form.block) for c in costs)
    operator = sum(c.operator(before) for c in costs)
    if layer.site is not None and layer.site.reads:
        return replace(form, cost=cost)
    cost, operator = CALL + cost, CALL + operator
    ratio = cost / operator
    if ratio > ALIKE:
        compared = f"the recurrence is the faster choice here, by an estimated {near(ratio, 2)}×"
    elif ratio < 1 / ALIKE:
        compared = f"an estimated {near(1 / ratio, 2)}× faster than the recurrence"
    else:
        compared = "by estimate about as fast as the recurrence"
    why = f"{form.why}; {compared}" if form.why else compared
    return replace(form, why=why, cost=cost, operator=operator)


def _filter(model: Model, layer: Layer, depths: Mapping[str, int]) -> Form:
    """Return the filter form of a layer of linear cells."""
    for r in layer.recurrences:
        if reason := _no_filter(model, r, depths[r.label]):
            raise UnsupportedModelError(
                f"the form filter needs a linear cell, got {r.label}, {reason}",
                help="choose --form auto",
            )
    return Form("filter", why="the cell is linear")


def _no_filter(model: Model, recurrence: Recurrence, depth: int) -> str:
    """Say why a recurrence is no convolution of its depth; empty where it is one."""
    cell = recurrence.cell
    if linear_map(cell) is None:
        return "which is not linear"
    if recurrence.initial.source == "computed":
        return "whose initial state the graph computes"
    if model.dtype == "float64":
        return "in float64, which ONNX Runtime does not convolve"
    taps = depth * cell.hidden_size * (cell.input_size + 1)
    return f"whose {depth} taps hold {taps:,} numbers" if taps > MOST_TAPS else ""


def _cheapest(
    model: Model, layer: Layer, depths: Mapping[str, int], shape: Shape, steps: int
) -> Form:
    """Return the form that is wanted, or the one that costs least."""
    form, keep_ops = shape.form, shape.keep_ops
    costs = [Costs(r.cell, depths[r.label], keep_ops) for r in layer.recurrences]
    block = max(costs, key=lambda c: c.depth).best_block(steps)
    counted: dict[FormName, float] = {"chunk": sum(c.chunk(steps, block) for c in costs)}
    if not keep_ops or form == "window":
        counted["window"] = sum(c.window(steps) for c in costs)
    if not keep_ops and not any(_no_filter(model, r, depths[r.label]) for r in layer.recurrences):
        counted["filter"] = sum(c.filter(steps) for c in costs)
    name: FormName = min(counted, key=counted.__getitem__) if form == "auto" else form
    others = {other: cost for other, cost in counted.items() if other != name}
    chosen = Form(name, block if name == "chunk" else 1, keep_ops)
    if not others:
        return _priced(layer, chosen, depths, steps, steps)
    next_best = min(others, key=others.__getitem__)
    took, other = counted[name], others[next_best]
    ratio = max(took, other) / min(took, other)
    if ratio > ALIKE:
        verdict = f"{near(ratio, 2)}× {'less' if took <= other else 'more'} work than"
    else:
        verdict = "about as much work as"
    why = f"{verdict} a {next_best}, as counted for {steps} steps"
    return _priced(layer, replace(chosen, why=why), depths, steps, steps)
