"""What each recurrence sees: the data's or synthetic inputs, brought to every layer.

A measured number belongs to the inputs it was measured on. For a PyTorch stack those are
the sequences themselves, and below the first layer the outputs of the layer before; for
an ONNX graph the part of the graph before a recurrence is run, so that a layer behind a
convolution is measured on what the convolution gives it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rnnaudit import cells, runtime
from rnnaudit.data import UNNAMED, Data
from rnnaudit.errors import LoadError
from rnnaudit.estimators.probes import KINDS, synthetic
from rnnaudit.findings import finding
from rnnaudit.model import Model, Site, Stack
from rnnaudit.results import Finding
from rnnaudit.verification.inputs import data_feeds, probe_feeds
from rnnaudit.verification.slots import of_graph

SEQUENCES = 32
LENGTH = 256

MOST_ROWS = 64
"""A layer whose batch axis holds more rows (frequency bands, say) is sampled down to these."""

SHORTEST = 8
"""Steps below which a sequence says nothing of memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """Inputs of every stack and every recurrence, in groups of equal length.

    Attributes:
        stacks: Inputs [N, T, I] of each stack's first layer, by the stack's position.
        recurrences: Inputs [N, T, I] by ``Recurrence.label``, aligned with time.
        synthetic: Whether the inputs were made up, by the stack's position.
        kinds: The kind of each synthetic sequence, by the stack's position; empty for data.
        description: What a report says of the inputs.
        findings: What could not be measured as asked.
    """

    stacks: tuple[tuple[Tensor, ...], ...]
    recurrences: Mapping[str, tuple[Tensor, ...]]
    synthetic: tuple[bool, ...]
    kinds: tuple[tuple[str, ...], ...]
    description: str
    findings: tuple[Finding, ...] = ()


def observe(
    model: Model,
    data: Data | None,
    *,
    seed: int,
    input_range: tuple[float, float] | None = None,
    sequences: int = SEQUENCES,
    length: int = LENGTH,
) -> Observation:
    """Bring the data, or synthetic inputs where there are none, to every recurrence.

    Raises:
        LoadError: The data do not fit the width of the model's input.
    """
    if model.graph is not None and not (model.whole and data is None):
        given, findings = _captured(model, data, seed, sequences, length)
    else:
        given, findings = _given(model, data)
    stacks, made_up = [], []
    for i, stack in enumerate(model.stacks):
        groups = given.get(i)
        made_up.append(groups is None or data is None)
        if groups is None:
            groups = (_made_up(stack, sequences, length, seed + i, input_range),)
        stacks.append(groups)
    seen: dict[str, tuple[Tensor, ...]] = {}
    for stack, groups in zip(model.stacks, stacks, strict=True):
        seen.update(_through(stack, groups))
    description = (
        data.describe()
        if data is not None
        else f"{sequences} synthetic sequences of {length} steps"
    )
    kinds = tuple(
        _kinds(groups) if new else () for groups, new in zip(stacks, made_up, strict=True)
    )
    return Observation(tuple(stacks), seen, tuple(made_up), kinds, description, findings)


def _kinds(groups: Sequence[Tensor]) -> tuple[str, ...]:
    """Name the kind of each synthetic sequence; empty where the rows are no longer in order."""
    if len(groups) > 1 or len(groups[0]) >= MOST_ROWS:
        return ()
    return tuple(KINDS[n % len(KINDS)] for n in range(len(groups[0])))


def _made_up(
    stack: Stack,
    sequences: int,
    length: int,
    seed: int,
    input_range: tuple[float, float] | None,
) -> Tensor:
    """Return synthetic inputs [N, T, I], within the range where one is given."""
    low = high = None
    if input_range is not None:
        low, high = (
            torch.full((stack.input_size,), end, dtype=torch.float64) for end in input_range
        )
    return synthetic(
        stack.input_size, sequences=sequences, length=length, seed=seed, low=low, high=high
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


def _given(
    model: Model, data: Data | None
) -> tuple[dict[int, tuple[Tensor, ...]], tuple[Finding, ...]]:
    """Give the data to the stack that they fit."""
    if data is None:
        return {}, ()
    name = UNNAMED if UNNAMED in data.inputs else next(iter(data.inputs))
    width = data.width(name)
    fitting = [i for i, stack in enumerate(model.stacks) if stack.input_size == width]
    if not fitting:
        widths = sorted({stack.input_size for stack in model.stacks})
        raise LoadError(
            f"the data must have {' or '.join(map(str, widths))} features per step, "
            f"got {width} from {data.source}",
            help="give sequences [time, features] of that width",
            id="RA107",
        )
    groups = by_length([torch.as_tensor(x, dtype=torch.float64) for x in data.inputs[name]])
    if len(model.stacks) == 1:
        return {0: groups}, ()
    note = finding(
        "RA207",
        model.stacks[fitting[0]].name,
        f"the data were given to {model.stacks[fitting[0]].name}; "
        "the other stacks were measured on synthetic inputs",
    )
    return {fitting[0]: groups}, (note,)


def _captured(
    model: Model, data: Data | None, seed: int, sequences: int, length: int
) -> tuple[dict[int, tuple[Tensor, ...]], tuple[Finding, ...]]:
    """Run the graph and keep what its recurrent nodes read."""
    slots = of_graph(model, runtime.describe(model.path))
    if data is not None:
        feeds = data_feeds(slots, data, seed)
    else:
        feeds = probe_feeds(slots, sequences, length, seed)
    sites = [stack.layers[0].site for stack in model.stacks]
    fetch = [site.x for site in sites if site is not None]
    outcome = runtime.run(model.path, [feed.values for feed in feeds], fetch=fetch)
    if outcome.outputs is None:
        reason = f"the graph did not run ({outcome.error})"
        return {}, (_not_seen("every recurrence", reason),)
    given: dict[int, tuple[Tensor, ...]] = {}
    findings = []
    for i, (stack, site) in enumerate(zip(model.stacks, sites, strict=True)):
        if site is None:
            continue
        groups = by_length(_rows([_batch(found[site.x], site) for found in outcome.outputs], seed))
        steps = max(x.shape[1] for x in groups)
        if steps < SHORTEST:
            reason = f"the graph gives it {steps} step{'s' if steps > 1 else ''} per call"
            findings.append(_not_seen(stack.name, reason))
        elif not all(bool(x.isfinite().all()) for x in groups):
            findings.append(_not_seen(stack.name, "the graph gives it NaN or infinity"))
        else:
            given[i] = groups
    return given, tuple(findings)


def _not_seen(where: str, reason: str) -> Finding:
    return finding(
        "RA210", where, f"{reason}, so {where} was measured on synthetic inputs of its own"
    )


def _batch(found: NDArray[np.generic], site: Site) -> Tensor:
    """Bring a captured value [T, N, I], or [N, T, I] with layout 1, to [N, T, I] in float64."""
    x = torch.from_numpy(np.ascontiguousarray(found.astype(np.float64)))
    return x if site.layout == 1 else x.transpose(0, 1).contiguous()


def _rows(batches: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Return single sequences [T, I], at most ``MOST_ROWS`` of them, drawn at random."""
    rows = [row for batch in batches for row in batch]
    if len(rows) <= MOST_ROWS:
        return rows
    chosen = np.random.default_rng(seed).choice(len(rows), MOST_ROWS, replace=False)
    return [rows[i] for i in sorted(chosen)]


def by_length(sequences: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Stack sequences [T, I] of equal length into batches [N, T, I], shortest first."""
    lengths = sorted({len(x) for x in sequences})
    return tuple(torch.stack([x for x in sequences if len(x) == T]) for T in lengths)
