"""A witness runs again where the model lives: in ONNX Runtime, or in PyTorch's own modules.

Two runs suffice for a causal system: one reads the prefix and the inputs, the other the
inputs alone, and after j inputs they are as far apart as depth j errs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rnnaudit import runtime
from rnnaudit.errors import LoadError, UnsupportedModelError
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
    inputs = witness.inputs[:deepest]
    run, name = _runner(model, part)
    full, restarted = run([torch.cat([witness.prefix, inputs]), inputs])
    gaps = _distances(full, restarted, deepest, witness.norm)
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
    )


def _part(model: Model, stored: Stored) -> Recurrence | Stack:
    """Return what the witness speaks of."""
    parts: Mapping[str, Recurrence | Stack] = {
        **{r.label: r for r in model.recurrences()},
        **{stack.name: stack for stack in model.stacks},
    }
    part = parts.get(stored.where)
    width = stored.witness.prefix.shape[1]
    if part is None:
        raise _refuse(f"one of {', '.join(parts)}, got one of {stored.where!r}")
    reads = part.cell.input_size if isinstance(part, Recurrence) else part.input_size
    if reads != width:
        raise _refuse(f"{reads} features per step for {stored.where}, got {width}")
    return part


def _refuse(wanted: str) -> LoadError:
    return LoadError(
        f"the witness must be {wanted}", help="is it a witness of this model?", id="RA237"
    )


def _runner(model: Model, part: Recurrence | Stack) -> tuple[Runner, str]:
    """Return what runs the part, and its name: the file itself where that is all of it."""
    if isinstance(part, Recurrence):
        # A witness holds inputs in reading order, so that every direction runs forward.
        alone = Stack(part.name, (Layer((replace(part, reverse=False),)),))
        whole = [r.label for r in model.recurrences()] == [part.label] and not part.reverse
        whole = whole and model.stacks[0].readout is None
    else:
        alone, whole = part, True
    if model.graph is not None and model.whole and whole:
        return lambda xs: _in_graph(model, xs), "the model in ONNX Runtime"
    if (
        model.graph is None
        and torch_outputs(alone, torch.zeros(1, 1, alone.input_size).double()) is not None
    ):
        return lambda xs: [_in_torch(alone, x) for x in xs], "PyTorch's own modules in float64"
    return lambda xs: _as_written(model, alone, xs), f"the weights of {alone.name} in ONNX Runtime"


def _in_torch(stack: Stack, x: Tensor) -> Array:
    y = torch_outputs(stack, x[None])
    if y is None:
        raise UnsupportedModelError(f"PyTorch has no module for {stack.name}", id="RA304")
    array: Array = y[0].numpy()
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
        raise UnsupportedModelError(
            f"the model must run on the witness, got: {outcome.error}",
            help="is it a witness of this model?",
            id="RA304",
        )
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
