"""Which form each truncated layer is written in: what was asked for, or what costs least."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from rnnaudit.errors import UnsupportedModelError, UsageError
from rnnaudit.export.costs import Costs
from rnnaudit.export.layers import reach
from rnnaudit.export.nodes import find_node
from rnnaudit.export.reads import Readers
from rnnaudit.model import Layer, Model
from rnnaudit.truncation import AUTO, Form, FormName, Shape

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
    else the cheaper of ``window`` and ``chunk`` for one sequence of the length that is expected.

    Args:
        model: The model as loaded.
        depths: Truncation depth by ``Recurrence.label``.
        shape: What is wanted; its ``steps`` go before ``lengths``.
        lengths: Length of the sequences that a recurrence was seen to read, by its label.

    Returns:
        The form by the label of the layer's first recurrence.

    Raises:
        UsageError: A window is wanted with recurrent operators.
        UnsupportedModelError: ``last`` is wanted of a layer whose other outputs are read.
    """
    form, keep_ops = shape.form, shape.keep_ops
    if form == "window" and keep_ops:
        raise UsageError(
            "recurrent operators are kept in the forms chunk and last, got --form window",
            help="leave out --keep-ops, or --form",
        )
    forms: dict[str, Form] = {}
    reaches: dict[str, int] = {}
    layers = [layer for stack in model.stacks for layer in stack.layers]
    for layer in _backwards(model, layers):
        if any(r.label not in depths for r in layer.recurrences):
            continue
        label, final = layer.recurrences[0].label, _final_steps(model, layer, reaches)
        if form in ("auto", "last") and final is not None:
            forms[label] = _last(layer, depths, max(1, final), keep_ops=keep_ops)
            if layer.site is not None and (final or not _reverse(layer)):
                reaches[layer.site.node] = reach(layer, depths, max(1, final))
        elif form == "last":
            raise UnsupportedModelError(
                f"the form last needs a graph that reads only the final outputs of a layer, got "
                f"{label}, whose other outputs are read too",
                help="choose --form chunk",
            )
        else:
            steps = shape.steps or (lengths or {}).get(label, STEPS)
            forms[label] = _cheapest(layer, depths, form, keep_ops=keep_ops, steps=steps)
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
    node = find_node(model.graph.graph, layer.site.node)
    final = Readers(reaches).final_steps(node.outputs[0], layer.site.layout, 4)
    states = any(v.uses() or v.is_graph_output() for v in node.outputs[1:])
    return None if final and states and _reverse(layer) else final


def _last(layer: Layer, depths: Mapping[str, int], final: int, *, keep_ops: bool) -> Form:
    steps = reach(layer, depths, final)
    deepest = max(layer.recurrences, key=lambda r: depths[r.label])
    block = Costs(deepest.cell, depths[deepest.label]).best_block(steps)
    read = "step is" if final == 1 else f"{final} steps are"
    why = f"only the final {read} read: {steps} steps of input suffice"
    return Form("last", min(block, final), keep_ops, final, why)


def _cheapest(
    layer: Layer,
    depths: Mapping[str, int],
    form: FormName | Literal["auto"],
    *,
    keep_ops: bool,
    steps: int,
) -> Form:
    """Return the window or the chunk form, whichever is wanted or costs less."""
    costs = [Costs(r.cell, depths[r.label], keep_ops) for r in layer.recurrences]
    block = max(costs, key=lambda c: c.depth).best_block(steps)
    window, chunk = sum(c.window(steps) for c in costs), sum(c.chunk(steps, block) for c in costs)
    name = form
    if name == "auto":
        name = "window" if window <= chunk and not keep_ops else "chunk"
    assert name != "last"
    if name == "window":
        block = 1
    took, other = (window, chunk) if name == "window" else (chunk, window)
    than = "chunk" if name == "window" else "window"
    ratio = max(took, other) / min(took, other)
    verdict = "less" if took <= other else "more"
    why = f"{ratio:.2g}× {verdict} work than a {than}, as counted for {steps} steps"
    return Form(name, block, keep_ops, why=why)
