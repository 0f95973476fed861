"""A live module beside our reading of it: is the stack the module, from input to output?"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rnnaudit import cells
from rnnaudit.findings import finding
from rnnaudit.loaders.module import evaluating
from rnnaudit.model import Model, Stack

STEPS = 12
"""Steps of the one input that a live module is run on."""

CLOSE = 1e-5
"""How far the module may be from our reading, relative: a weight it computes is rounded."""


def confirmed(model: Model, module: nn.Module) -> Model:
    """Run a live module once, and let the model be ``whole`` only where it gives what we read.

    What a ``forward`` does between and after its parts shows in no weight: a softmax, a sum
    over time. The module runs in float64 and eval mode on two random sequences, in either
    order of axes; its output is the stack's at every step or at the last.
    """
    if not model.whole:
        return model
    stack = model.stacks[0]
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2, STEPS, stack.input_size, dtype=torch.float64, generator=rng)
    y = cells.run_stack(stack, x)
    reason = "its own output is another"
    for given, wanted in ((x, y), (x.transpose(0, 1), y.transpose(0, 1))):
        try:
            with torch.no_grad():
                came = next(tensors(_run(module, given)), None)
        except Exception as error:  # whatever the user's code does
            shape = f"[2, {STEPS}, {stack.input_size}]"
            reason = f"on sequences {shape} it raises {type(error).__name__}"
            continue
        if came is not None and any(_same(came, form) for form in (wanted, y[:, -1])):
            return model
    message = (
        f"the module computes more than {stack.name} with at most one linear layer, or something "
        f"else ({reason}): depths are of that stack's output"
    )
    return replace(
        model, whole=False, findings=(*model.findings, finding("RA128", stack.name, message))
    )


def outputs(module: nn.Module, stack: Stack, x: Tensor) -> Tensor | None:
    """Run the module that a stack was read from on x [N, T, I], in float64.

    Returns:
        The outputs [N, T, O], or None where it is a single cell, quantised, or computes its
        weights, which come out otherwise in float64.
    """
    if type(module) not in (nn.RNN, nn.GRU, nn.LSTM) or module._forward_pre_hooks:
        return None
    with torch.no_grad():
        turned = x if module.batch_first else x.transpose(0, 1)
        y, _ = _run(module, turned)
        return cells.readout(stack, y if module.batch_first else y.transpose(0, 1))


def _run(module: nn.Module, x: Tensor) -> Any:
    """Call a copy of a module in float64 and eval mode.

    A module that cannot be copied is called itself, on copies of its parameters and buffers.
    """
    try:
        copied = copy.deepcopy(module)
    except Exception:  # whatever the user's code does
        copied = None
    if copied is not None:
        return copied.cpu().double().eval()(x)
    named = itertools.chain(module.named_parameters(), module.named_buffers())
    copies = {
        name: tensor.detach().cpu().to(_wide(tensor.dtype), copy=True) for name, tensor in named
    }
    with evaluating(module):
        return torch.func.functional_call(module, copies, (x,))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


def _same(came: Tensor, wanted: Tensor) -> bool:
    if came.shape != wanted.shape:
        return False
    size = max(1.0, float(wanted.abs().max()))
    return float((came - wanted).abs().max()) <= CLOSE * size


def tensors(output: object) -> Iterator[Tensor]:
    """Yield the tensors of whatever a module returns, the first one first."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for part in output.values():
            yield from tensors(part)
    elif isinstance(output, Sequence) and not isinstance(output, str):
        for part in output:
            yield from tensors(part)
