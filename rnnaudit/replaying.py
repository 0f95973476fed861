"""A witness runs again where the model lives: in ONNX Runtime, or in PyTorch's own modules.

Two runs suffice for a causal system: one reads the prefix and the inputs, the other the
inputs alone, and after j inputs they are as far apart as depth j errs. Where a stack reads
both ways its recurrences also run on every window of j inputs, each layer on what the one
before gives there: that is the depth-j model, made of the runtime's own operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rnnaudit import cells, runtime
from rnnaudit.cells.chain import Chain
from rnnaudit.errors import LoadError, UnsupportedModelError
from rnnaudit.estimators import Recording, recording
from rnnaudit.estimators import witness as in_float64
from rnnaudit.export import assemble, serialize
from rnnaudit.model import Layer, Model, Recurrence, Stack
from rnnaudit.refutation import Stored, weights_fingerprint
from rnnaudit.results import Replay
from rnnaudit.verification.inputs import arrange, numpy_dtype
from rnnaudit.verification.originals import torch_outputs
from rnnaudit.verification.slots import Slot, of_graph

Array = NDArray[np.generic]

Runner = Callable[[list[Tensor]], list[Array]]
"""Maps sequences [T, I] to outputs, each with T on the same axis where it has one."""

SHOWN = 24
"""Depths of a recording that are cut again, at most."""

ROWS = 1 << 16
"""Steps of windows that one run reads."""


def replay(model: Model, stored: Stored) -> Replay:
    """Run a witness's deepest refuted depth again, in the model's own runtime.

    Raises:
        LoadError: The model has no such part, or the witness refutes nothing.
        UnsupportedModelError: No runtime has such a cell.
    """
    witness = stored.witness
    deepest = witness.refuted_below(stored.eps) - 1
    if deepest < 1:
        raise _refuse(f"one that refutes a depth of at least 1, for ε = {stored.eps:g}")
    part = _part(model, stored)
    if isinstance(witness, Recording):
        return _replay_cut(model, part, stored, witness, deepest)
    inputs = witness.inputs[:deepest]
    lengths = {len(witness.prefix) + deepest, deepest}
    run, name = _runner(model, part, lengths)
    full, restarted = run([torch.cat([witness.prefix, inputs]), inputs])
    gaps = _distances(full, restarted, deepest, witness.norm)
    several = [part] if isinstance(part, Recurrence) else list(part.recurrences())
    chain = Chain.of(several, None if isinstance(part, Recurrence) else part.readout)
    again = in_float64(chain, witness.prefix, inputs, witness.norm)
    depths = tuple(range(deepest - len(gaps) + 1, deepest + 1))
    return Replay(
        where=stored.where,
        eps=stored.eps,
        norm=witness.norm,
        depths=depths,
        found=tuple(witness.distances[k].item() for k in depths),
        replayed=tuple(gaps),
        runtime=name,
        domain=stored.domain,
        same_weights=weights_fingerprint(part) == stored.fingerprint,
        rounding=_not_shown(gaps[-1], float(again.distances[-1]) - again.rounding, stored.eps),
    )


def _not_shown(gap: float, certain: float, eps: float) -> float:
    """Return how much of a distance float64 is not certain of; 0 where it is of more than ε."""
    return 0.0 if certain > eps else max(0.0, gap - max(certain, 0.0))


def _part(model: Model, stored: Stored) -> Recurrence | Stack:
    """Return what the witness speaks of."""
    parts: Mapping[str, Recurrence | Stack] = {
        **{r.label: r for r in model.recurrences()},
        **{stack.name: stack for stack in model.stacks},
    }
    part = parts.get(stored.where)
    width = stored.witness.inputs.shape[1]
    if part is None:
        raise _refuse(f"one of {', '.join(parts)}, got one of {stored.where!r}")
    reads = part.cell.input_size if isinstance(part, Recurrence) else part.input_size
    if reads != width:
        raise _refuse(f"{reads} features per step for {stored.where}, got {width}")
    return part


def _replay_cut(
    model: Model, part: Recurrence | Stack, stored: Stored, witness: Recording, deepest: int
) -> Replay:
    """Run a whole sequence, and every recurrence on windows of it, at depths up to the deepest."""
    if not isinstance(part, Stack):
        raise _refuse("one of a stack, where it holds depths")
    depths = tuple(k for k in witness.depths if 1 <= k <= deepest)[-SHOWN:]
    x = witness.inputs
    full, name = _whole_outputs(model, part, x)
    gaps = []
    for cut in _cut_outputs(model, part, x, depths):
        gap = np.abs(full.astype(np.float64) - cut.astype(np.float64))
        size = gap.max(-1) if witness.norm == "max" else np.sqrt(np.square(gap).sum(-1))
        gaps.append(float(np.nan_to_num(size, nan=0.0, posinf=np.finfo(np.float64).max).max()))
    found = dict(zip(witness.depths, witness.distances.tolist(), strict=True))
    again = recording(part, x, depths[-1], witness.norm)
    return Replay(
        where=stored.where,
        eps=stored.eps,
        norm=witness.norm,
        depths=depths,
        found=tuple(found[k] for k in depths),
        replayed=tuple(gaps),
        runtime=name,
        domain=stored.domain,
        same_weights=weights_fingerprint(part) == stored.fingerprint,
        both_ways=True,
        rounding=_not_shown(gaps[-1], again.distances[-1].item() - again.rounding, stored.eps),
    )


def _whole_outputs(model: Model, stack: Stack, x: Tensor) -> tuple[Array, str]:
    """Return a stack's outputs [T, O] on x [T, I], from the file itself where it gives them."""
    if _takes(model, {len(x)}):
        slots = of_graph(model, runtime.describe(model.path))
        outcome = runtime.run(model.path, [{slot.name: _value(slot, slots, x) for slot in slots}])
        if outcome.outputs is None:
            raise _cannot_run(outcome.error)
        for array in outcome.outputs[0].values():
            y = _in_order(array, len(x), stack)
            if y is not None:
                return y, "the model in ONNX Runtime"
    run = _rows_runner(model, stack)
    own = model.graph is None and torch_outputs(stack, x[None, :1]) is not None
    name = "PyTorch's own modules in float64" if own else _of_weights(stack)
    return run([x[None]])[0][0].numpy(), name


def _in_order(array: Array, T: int, stack: Stack) -> Array | None:
    """Bring what a graph gives for one sequence to [T, O]; None where that is something else."""
    axes = [axis for axis, size in enumerate(array.shape) if size == T]
    if len(axes) != 1 or array.size != T * stack.output_size:
        return None
    y: Array = np.moveaxis(array.astype(np.float64), axes[0], 0).reshape(T, -1)
    return y


def _cut_outputs(model: Model, stack: Stack, x: Tensor, depths: Sequence[int]) -> list[Array]:
    """Return a stack's outputs [T, O] at each depth, its recurrences run on windows."""
    xs = [x for _ in depths]
    for layer in stack.layers:
        sides = [_on_windows(model, stack, r, xs, depths) for r in layer.recurrences]
        xs = [torch.cat(parts, dim=-1) for parts in zip(*sides, strict=True)]
    return [cells.readout(stack, x).numpy() for x in xs]


def _on_windows(
    model: Model, stack: Stack, recurrence: Recurrence, xs: list[Tensor], depths: Sequence[int]
) -> list[Tensor]:
    """Return a recurrence's last output [T, H] on each window of the k inputs before, for each k.

    The first k outputs have no more inputs before them: one run gives them all.
    """
    alone = Stack(stack.name, (Layer((replace(recurrence, reverse=False, layer=0),)),))
    parts: list[list[Tensor]] = []
    for aligned, k in zip(xs, depths, strict=True):
        x = aligned.flip(0) if recurrence.reverse else aligned
        later = x.unfold(0, k, 1)[1:].mT if k < len(x) else x.new_zeros(0, k, x.shape[1])
        parts.append([x[None, :k], *later.split(max(1, ROWS // k))])
    ran = iter(_rows_runner(model, alone)([rows for each in parts for rows in each if len(rows)]))
    found = []
    for each in parts:
        first, *others = (next(ran) for rows in each if len(rows))
        y = torch.cat([first[0], *(rows[:, -1] for rows in others)])
        found.append(y.flip(0) if recurrence.reverse else y)
    return found


def _rows_runner(model: Model, alone: Stack) -> Callable[[list[Tensor]], list[Tensor]]:
    """Return what runs a stack on several rows [N, T, I]: PyTorch without a graph, or else ORT."""
    if model.graph is None:
        probe = torch_outputs(alone, torch.zeros(1, 1, alone.input_size).double())
        if probe is not None:
            return lambda several: [_of_torch(alone, rows) for rows in several]
    graph = serialize(assemble([alone], {}, dtype=model.dtype))
    dtype = numpy_dtype(runtime.describe(graph).inputs[0].dtype)

    def run(several: list[Tensor]) -> list[Tensor]:
        feeds = [{"x": rows.transpose(0, 1).numpy().astype(dtype)} for rows in several]
        outcome = runtime.run(graph, feeds)
        if outcome.outputs is None:
            raise _cannot_run(outcome.error)
        arrays = [next(iter(found.values())) for found in outcome.outputs]
        return [torch.from_numpy(y.astype(np.float64)).transpose(0, 1) for y in arrays]

    return run


def _of_torch(stack: Stack, rows: Tensor) -> Tensor:
    y = torch_outputs(stack, rows)
    if y is None:
        raise UnsupportedModelError(f"PyTorch has no module for {stack.name}", id="RA304")
    return y


def _cannot_run(error: str | None) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the model must run on the witness, got: {error}",
        help="is it a witness of this model?",
        id="RA304",
    )


def _refuse(wanted: str) -> LoadError:
    return LoadError(
        f"the witness must be {wanted}", help="is it a witness of this model?", id="RA237"
    )


def _takes(model: Model, lengths: Set[int]) -> bool:
    """Whether the file is no more than a stack in ONNX, and takes sequences of these lengths."""
    if model.graph is None or not model.whole:
        return False
    fixed = {slot.fixed("time") for slot in of_graph(model, runtime.describe(model.path))}
    return all(steps is None or lengths == {steps} for steps in fixed)


def _runner(model: Model, part: Recurrence | Stack, lengths: Set[int]) -> tuple[Runner, str]:
    """Return what runs the part, and its name: the file itself where that is all of it."""
    if isinstance(part, Recurrence):
        # A witness holds inputs in reading order, so that every direction runs forward.
        alone = Stack(part.name, (Layer((replace(part, reverse=False),)),))
        whole = [r.label for r in model.recurrences()] == [part.label] and not part.reverse
        whole = whole and model.stacks[0].readout is None
    else:
        alone, whole = part, True
    if whole and _takes(model, lengths):
        return lambda xs: _in_graph(model, xs), "the model in ONNX Runtime"
    if (
        model.graph is None
        and torch_outputs(alone, torch.zeros(1, 1, alone.input_size).double()) is not None
    ):
        return lambda xs: [_in_torch(alone, x) for x in xs], "PyTorch's own modules in float64"
    return lambda xs: _as_written(model, alone, xs), _of_weights(alone)


def _of_weights(stack: Stack) -> str:
    return f"the weights of {stack.name} in ONNX Runtime"


def _in_torch(stack: Stack, x: Tensor) -> Array:
    array: Array = _of_torch(stack, x[None])[0].numpy()
    return array


def _as_written(model: Model, stack: Stack, xs: list[Tensor]) -> list[Array]:
    """Run a stack alone, as ONNX operators with the model's weights."""
    graph = serialize(assemble([stack], {}, dtype=model.dtype))
    dtype = numpy_dtype(runtime.describe(graph).inputs[0].dtype)
    return _ran(graph, [{"x": x[:, None].numpy().astype(dtype)} for x in xs], stack)


def _in_graph(model: Model, xs: list[Tensor]) -> list[Array]:
    """Run the model's own graph; inputs beside the sequence are zero, lengths full."""
    slots = of_graph(model, runtime.describe(model.path))
    feeds = [{slot.name: _value(slot, slots, x) for slot in slots} for x in xs]
    return _ran(model.path, feeds, model.stacks[0])


def _value(slot: Slot, slots: tuple[Slot, ...], x: Tensor) -> Array:
    batch = next((n for s in slots if (n := s.fixed("batch")) is not None), 1)
    if slot.main and slot.fill == "values":
        return arrange(np.stack([x.numpy()] * batch), slot, "the witness")
    fill = len(x) if slot.fill == "lengths" else 0
    return np.full(slot.shape(batch, len(x)), fill, numpy_dtype(slot.dtype))


def _ran(model: object, feeds: list[dict[str, Array]], stack: Stack) -> list[Array]:
    """Return the output that follows time, or else the last one as wide as the stack's."""
    outcome = runtime.run(model, feeds)  # type: ignore[arg-type]
    if outcome.outputs is None:
        raise _cannot_run(outcome.error)
    first, second = outcome.outputs
    names = [name for name in first if first[name].shape != second[name].shape]
    names = names or [name for name in first if first[name].shape[-1:] == (stack.output_size,)]
    name = (names or list(first))[0]
    return [first[name], second[name]]


def _distances(full: Array, restarted: Array, steps: int, norm: str) -> list[float]:
    """Return the distance after each of the steps, or after the last where time has no axis."""
    a, b = full.astype(np.float64), restarted.astype(np.float64)
    axes = [i for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n]
    if axes:
        a, b = (np.moveaxis(y, axes[0], 0)[-steps:] for y in (a, b))
    else:
        a, b = a[None], b[None]
    gap = np.abs(a - b).reshape(len(a), -1)
    size = gap.max(1) if norm == "max" else np.sqrt(np.square(gap).sum(1))
    return [float(value) for value in np.nan_to_num(size, nan=0.0, posinf=np.finfo(np.float64).max)]
