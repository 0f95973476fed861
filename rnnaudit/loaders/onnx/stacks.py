"""Recurrent nodes that feed one another through layout operators only make one stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
import torch

from rnnaudit.findings import finding
from rnnaudit.loaders.onnx.axes import Layout
from rnnaudit.loaders.onnx.nodes import Read
from rnnaudit.loaders.onnx.values import Knowledge
from rnnaudit.model import Layer, Readout, Stack, fingerprint
from rnnaudit.results import Finding


@dataclass(frozen=True, slots=True, eq=False)
class Assembled:
    """The stacks of a graph, and whether one of them is the model from input to output.

    ``twins`` are the layers, in other branches, of stacks that are the same to the last bit,
    by the name of the stack that stands for them.
    """

    stacks: tuple[Stack, ...]
    whole: bool
    twins: Mapping[str, tuple[Layer, ...]]
    findings: tuple[Finding, ...]


def assemble(reads: Sequence[Read], graph: ir.Graph, known: Knowledge) -> Assembled:
    """Chain nodes into stacks, and find the linear layer after the only one.

    A node follows another when its X is that node's Y with time, batch and features (both
    directions side by side) proved to be in their places. ``whole`` also asks that X is the
    graph's only input and the outputs over time, maybe through one linear layer, its only
    output besides the last of them (Y_h). The last state alone is not the whole model: the
    stack's error over all steps says more than the model lets out.
    """
    chains: list[list[Read]] = []
    for read in reads:
        chain = next((c for c in chains if _follows(c[-1], read)), None)
        if chain is None:
            chains.append([read])
        else:
            chain.append(read)
    readout = _readout(chains, graph, known)
    stacks = tuple(
        Stack(
            chain[0].layer.recurrences[0].name,
            tuple(_renumbered(read.layer, i) for i, read in enumerate(chain)),
            readout,
        )
        for chain in chains
    )
    whole = len(chains) == 1 and _whole(chains[0], graph, known)
    return _merged(stacks, whole=whole)


def _merged(stacks: Sequence[Stack], *, whole: bool) -> Assembled:
    """Let one stack stand for its copies in other branches of If: only one of them runs."""
    kept: dict[object, Stack] = {}
    twins: dict[str, list[Layer]] = {}
    findings = []
    for stack in stacks:
        sites = [layer.site for layer in stack.layers]
        scopes = {"" if site is None else site.scope for site in sites}
        alike = tuple(
            (fingerprint(r), r.reverse, r.rounded, site and (site.layout, bool(site.sequence_lens)))
            for layer, site in zip(stack.layers, sites, strict=True)
            for r in layer.recurrences
        )
        first = kept.setdefault(id(stack) if "" in scopes else alike, stack)
        if first is stack:
            continue
        renamed = (
            tuple(replace(r, name=first.name) for r in layer.recurrences) for layer in stack.layers
        )
        twins.setdefault(first.name, []).extend(
            replace(layer, recurrences=recurrences)
            for layer, recurrences in zip(stack.layers, renamed, strict=True)
        )
        findings.append(
            finding(
                "RA120",
                first.name,
                f"{stack.name}, in another branch, is the same to the last bit: it is audited, "
                f"and truncated, as {first.name}",
            )
        )
    return Assembled(
        tuple(kept.values()),
        whole,
        {name: tuple(layers) for name, layers in twins.items()},
        tuple(findings),
    )


def _renumbered(layer: Layer, index: int) -> Layer:
    return replace(layer, recurrences=tuple(replace(r, layer=index) for r in layer.recurrences))


def _follows(before: Read, after: Read) -> bool:
    site, next_site = before.layer.site, after.layer.site
    if before.y is None or after.x.origin is not before.y or site is None or next_site is None:
        return False
    if (site.sequence_lens, site.scope) != (next_site.sequence_lens, next_site.scope):
        return False
    return (after.time, after.batch, after.x.axes[2]) == (
        before.time,
        before.batch,
        before.features,
    )


def _readout(chains: Sequence[Sequence[Read]], graph: ir.Graph, known: Knowledge) -> Readout | None:
    """Return the linear layer between the only stack's last Y and the only output."""
    if len(chains) != 1 or len(graph.outputs) != 1:
        return None
    last = chains[0][-1]
    layout = known.layout(graph.outputs[0])
    linear = None if layout is None else known.linear.get(layout.origin)
    if linear is None or linear.source is not last.y or linear.features != last.features:
        return None
    A = torch.from_numpy(np.ascontiguousarray(linear.A, dtype=np.float64))
    b = torch.from_numpy(np.broadcast_to(linear.b, A.shape[:1]).astype(np.float64))
    return Readout(linear.name, A, b)


def _whole(chain: Sequence[Read], graph: ir.Graph, known: Knowledge) -> bool:
    inputs = [value for value in graph.inputs if not value.is_initializer()]
    first, last = chain[0], chain[-1]
    if len(inputs) != 1 or first.x.origin is not inputs[0]:
        return False
    if any(read.layer.site is None or read.layer.site.sequence_lens for read in chain):
        return False
    if any(r.rounded for read in chain for r in read.layer.recurrences):
        return False
    # A start that the graph computes is not ours to assume.
    if any(r.initial.source == "computed" for read in chain for r in read.layer.recurrences):
        return False
    layouts = [known.layout(value) for value in graph.outputs]
    over_time = [lay for lay in layouts if lay is None or lay.origin not in last.finals]
    return len(over_time) == 1 and over_time[0] is not None and _leaves(last, over_time[0], known)


def _leaves(last: Read, layout: Layout, known: Knowledge) -> bool:
    """Whether an output holds the last layer's every step and unit, or their linear image."""
    units, linear = last.features, known.linear.get(layout.origin)
    if linear is not None and linear.source is last.y and linear.features == last.features:
        units = linear.units
    elif layout.origin is not last.y:
        return False
    atoms = {atom.name for axis in layout.axes for atom in axis}
    return atoms == {atom.name for atom in (*last.time, *last.batch, *units)}
