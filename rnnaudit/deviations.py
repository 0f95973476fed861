"""Where ONNX Runtime runs an operator otherwise than its text says: both outputs, measured.

What a clip or a missing alpha changes depends on the weights and on the inputs. Each node
that such a finding names is run alone in ONNX Runtime, on what its layer reads, beside two
float64 readings: the audit's own, and that of the operator's text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rnnaudit import cells, export, runtime
from rnnaudit.loaders.onnx.nodes import GATES, by_text
from rnnaudit.model import Layer, Model, Site, Stack
from rnnaudit.reports.numbers import DIGITS, counted, minus, near, up
from rnnaudit.results import Finding
from rnnaudit.versions import versions

if TYPE_CHECKING:
    import onnx_ir as ir

DEVIATIONS = frozenset({"RA110", "RA111"})
"""Findings that name a node which ONNX Runtime does not run by the operator's text."""

STEPS = 50
"""Steps that a node is run for."""

ROWS = 8
"""Sequences that it is run on."""

CLOSE = 1e-4
"""How far ONNX Runtime's float32 may be from our reading of it, relative to the largest output."""


def measured(model: Model, read: Sequence[Sequence[Tensor]]) -> Model:
    """Return the model, with what both readings give in the findings that tell them apart.

    Args:
        model: The model; without such a finding it is returned as it is.
        read: Inputs [N, T, I] of each stack's first layer, in groups of equal length.
    """
    told = {finding.where for finding in model.findings if finding.id in DEVIATIONS}
    pairs = {where: pair for where, pair in _pairs(model, read) if where in told} if told else {}
    if not pairs:
        return model
    said = _compared(list(pairs), list(pairs.values()), model)
    return replace(model, findings=tuple(_with(finding, said) for finding in model.findings))


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    """A layer beside the operator's text of its node, and what it reads [N, T, I]."""

    layer: Layer
    text: Layer
    node: ir.Node
    x: Tensor


def _pairs(model: Model, read: Sequence[Sequence[Tensor]]) -> list[tuple[str, _Pair]]:
    """Return a pair for each node of the graph that is a layer, by the node's path."""
    if model.graph is None:
        return []
    nodes = {node.name: node for node in model.graph.graph.all_nodes() if node.op_type in GATES}
    found = []
    for stack, groups in zip(model.stacks, read, strict=True):
        x = groups[-1][:ROWS, :STEPS]
        layers = [*stack.layers, *model.twins.get(stack.name, ())]
        for i, layer in enumerate(layers):
            if i % len(stack.layers) == 0:  # a copy in another branch reads the same
                given = x
            site = layer.site
            node = None if site is None or site.reads else nodes.get(site.node)
            if site is not None and node is not None:
                found.append((_path(site), _Pair(layer, by_text(node, layer), node, given)))
            given = cells.run_layer(layer, given)
    return found


def _path(site: Site) -> str:
    return f"{site.scope}/{site.node.lstrip('/')}" if site.scope else site.node


def _with(finding: Finding, said: Mapping[str, str]) -> Finding:
    if finding.id not in DEVIATIONS or finding.where not in said:
        return finding
    return replace(finding, message=f"{finding.message}: {said[finding.where]}")


def _compared(names: Sequence[str], pairs: Sequence[_Pair], model: Model) -> Mapping[str, str]:
    """Run the nodes side by side, each on its own input, and say what came by the node's path.

    They run in float32: ONNX Runtime has no others, and computes in it where it takes float16.
    """
    stacks = [Stack(f"node{i}", (pair.layer,)) for i, pair in enumerate(pairs)]
    graph = export.assemble(stacks, {})
    alone = [node for node in graph.graph if node.op_type in GATES]
    for node, pair in zip(alone, pairs, strict=True):
        # As the file has it, with nothing filled in: that is what is looked at.
        node.attributes.clear()
        node.attributes.update(
            (name, attribute)
            for name, attribute in pair.node.attributes.items()
            if name != "layout"
        )
    given = [pair.x.transpose(0, 1).numpy().astype(np.float32) for pair in pairs]
    feed = {str(v.name): x for v, x in zip(graph.graph.inputs, given, strict=True)}
    outcome = runtime.run(export.serialize(graph), [feed], deterministic=True)
    version = versions()["onnxruntime"] or ""
    if model.dtype == "float64":
        version += " (in float32: it runs no such node in float64)"
    if outcome.outputs is None:
        reason = f"ONNX Runtime {version} does not run it alone ({outcome.error})"
        return dict.fromkeys(names, reason)
    came = [outcome.outputs[0][str(v.name)].astype(np.float64) for v in graph.graph.outputs]
    return {
        name: _said(pair, torch.from_numpy(x), torch.from_numpy(y), version)
        for name, pair, x, y in zip(names, pairs, given, came, strict=True)
    }


def _said(pair: _Pair, given: Tensor, theirs: Tensor, version: str) -> str:
    """Say where the text and ONNX Runtime lie furthest apart on x [T, N, I], and what each gives.

    ``theirs`` [T, N, O] is what ONNX Runtime gave.
    """
    x = given.double().transpose(0, 1)
    text, ours = (cells.run_layer(layer, x).transpose(0, 1) for layer in (pair.text, pair.layer))
    finite = torch.stack([y.isfinite() for y in (text, theirs, ours)]).all(0)
    if not finite.any():
        return "on what it reads here the outputs are not finite"
    apart = torch.where(finite, text - theirs, 0.0).abs()
    gap, size = float(apart.max()), max(1.0, float(theirs[finite].abs().max()))
    over = f"over {counted(len(text), 'step')} of what it reads here"
    if gap <= CLOSE * size:
        return f"{over} the text and ONNX Runtime {version} stay within {up(gap)} of each other"
    t, n, unit = (int(i) for i in np.unravel_index(int(apart.argmax()), tuple(apart.shape)))
    largest = max(abs(float(y[t, n, unit])) for y in (text, theirs))
    digits = DIGITS + max(0, math.ceil(math.log10(largest / gap)))
    by_text, runs, audited = (
        minus(near(float(y[t, n, unit]), digits)) for y in (text, theirs, ours)
    )
    found = f"{over} outputs differ by up to {up(gap)}: at t = {t}, unit {unit}, the text gives "
    found += f"{by_text} and ONNX Runtime {version} {runs}"
    if float((ours - theirs)[finite].abs().max()) <= CLOSE * size:
        return found
    return f"{found}; this audit follows another version of it, which gives {audited}"
