"""A live module with its recurrences replaced by truncated ones, and how far it then errs."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from rnnaudit import export
from rnnaudit.data import Data
from rnnaudit.errors import LoadError, RnnauditError, UnsupportedModelError
from rnnaudit.estimators.probes import synthetic
from rnnaudit.examine import Examination, Progress
from rnnaudit.findings import finding
from rnnaudit.loaders.interface import brief
from rnnaudit.loaders.module import evaluating
from rnnaudit.model import Model
from rnnaudit.modules import Cut, truncate_
from rnnaudit.observe import LENGTH, MOST_ROWS, Owner
from rnnaudit.planning import TRIES, Wanted, chosen, plans
from rnnaudit.results import Equivalence, Finding, Skipped
from rnnaudit.truncation import Form, Plan, Shape
from rnnaudit.verification.judge import Outputs, Tried, judge
from rnnaudit.verification.live import tensors

STRICTER = (1, 8, 64)
"""Shares of ε that the recurrences themselves are given in turn: what follows may amplify."""

BATCH = 5
"""Fresh synthetic sequences that a truncated module is compared on, one of each kind."""

STARTED = "the module gives it an initial state that is not zero; the audit starts from zero"

Call = tuple[Any, ...]
"""The arguments of one call of a module."""


@dataclass(frozen=True, slots=True, eq=False)
class Swap:
    """A module that was cut by a plan, and how it compares with the original."""

    module: nn.Module
    plan: Plan
    forms: Mapping[str, Form]
    judged: Equivalence


def obstacles(model: Model) -> Mapping[str, str]:
    """Say by ``Recurrence.label`` why a recurrence has no truncated module."""
    return {
        r.label: "only nn.RNN, nn.GRU and nn.LSTM have a truncated module"
        for stack in model.stacks
        if not isinstance(model.source[stack.name], nn.RNNBase)
        for r in stack.recurrences()
    }


def calls_of(module: nn.Module, data: Data) -> list[Call]:
    """Return calls with the sequences of one length as one batch, in the module's precision.

    The batch axis comes first unless the first nn.RNN, nn.GRU or nn.LSTM inside takes time first.
    """
    time_first = _time_first(module)
    like = next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))
    (sequences,) = data.inputs.values() if len(data.inputs) == 1 else _several(data)
    calls = []
    for T in sorted({len(x) for x in sequences}):
        x = torch.stack([torch.as_tensor(each) for each in sequences if len(each) == T])
        x = x.to(like) if x.is_floating_point() else x.to(like.device)
        calls.append((x.transpose(0, 1) if time_first else x,))
    return calls


def _time_first(module: nn.Module) -> bool:
    """Whether the first nn.RNN, nn.GRU or nn.LSTM inside takes the steps on the first axis."""
    inside = (part for part in module.modules() if isinstance(part, nn.RNNBase))
    first = next(inside, None)
    return first is not None and not first.batch_first


def _several(data: Data) -> tuple[Sequence[Any]]:
    raise LoadError(
        f"a module takes sequences of one input here, got {', '.join(sorted(data.inputs))}",
        help="give a list of tuples, the arguments of each call",
        id="RA107",
    )


def read_by(
    module: nn.Module, model: Model, calls: Sequence[Call]
) -> tuple[dict[str, list[tuple[Owner, Tensor]]], tuple[Finding, ...]]:
    """Run a copy of a module and keep the rows [T, I] that each stack reads, with their sequences.

    Also say which stacks were given an initial state other than zero.

    Raises:
        LoadError: The module does not run on a call, or gives a recurrence NaN or infinity.
        UnsupportedModelError: It cannot be copied.
    """
    rows: dict[str, list[tuple[Owner, Tensor]]] = {stack.name: [] for stack in model.stacks}
    begun: dict[str, None] = {}
    running = copied(module)
    number = 0

    def watch(name: str, part: nn.RNNBase) -> None:
        at = _name(module, part)

        def keep(_: nn.Module, args: Call, kwargs: Mapping[str, Any]) -> None:
            given = args[0] if args else kwargs["input"]
            _check_width(at and name, part, given)
            room = MOST_ROWS - len(rows[name])
            rows[name] += [((number, n), x) for n, x in enumerate(_rows(part, given))][:room]
            start = args[1] if len(args) > 1 else kwargs.get("hx")
            if any(bool(part.any()) for part in tensors(start)):
                begun[name] = None

        running.get_submodule(at).register_forward_pre_hook(keep, with_kwargs=True)

    for name, part in model.source.items():
        if isinstance(part, nn.RNNBase):
            watch(name, part)
    for number, call in enumerate(calls):  # noqa: B007 (`keep` reads it)
        outputs_of(running, call)
    for name, read in rows.items():
        if not all(bool(x.isfinite().all()) for _, x in read):
            raise LoadError(f"{name} must read finite numbers, got NaN or infinity", id="RA107")
    return rows, tuple(finding("RA123", name, STARTED) for name in begun)


def _check_width(name: str, part: nn.RNNBase, given: Tensor | PackedSequence) -> None:
    width = (given.data if isinstance(given, PackedSequence) else given).shape[-1]
    wanted = part.input_size
    if width != wanted and not name:
        raise LoadError(
            f"the data must have {wanted} features per step, got {width}",
            help="give sequences [time, features] of that width",
            id="RA107",
        )
    if width != wanted:
        raise LoadError(
            f"{name} must be given {wanted} features per step, got {width}",
            help=f"give data from which the module makes {wanted} features per step",
            id="RA107",
        )


def _rows(part: nn.RNNBase, given: Tensor | PackedSequence) -> list[Tensor]:
    """Return what a recurrent module is given as rows [T, I] in float64."""
    if isinstance(given, PackedSequence):
        x, lengths = pad_packed_sequence(given, batch_first=True)
        pairs = zip(x, lengths.tolist(), strict=True)
        return [row[:length].detach().cpu().double() for row, length in pairs]
    x = given.detach().cpu().double()
    if x.dim() == 2:
        return [x]
    return list(x if part.batch_first else x.transpose(0, 1))


def outputs_of(module: nn.Module, call: Call) -> Outputs:
    """Call a module in eval mode; of a bare recurrence the outputs count, not the final state.

    Raises:
        LoadError: It does not run.
    """
    try:
        with evaluating(module), torch.no_grad():
            came = list(tensors(module(*call)))
    except RnnauditError:
        raise
    except Exception as error:  # whatever the user's code does
        shapes = [tuple(x.shape) for x in call if isinstance(x, Tensor)]
        raise LoadError(
            f"the module must take the data, got {type(error).__name__} on {shapes}: "
            f"{brief(error)}",
            help="give sequences with the features, the type and the axes that it takes, or a list "
            "of tuples, the arguments of each call",
            id="RA107",
        ) from error
    kept = came[:1] if isinstance(module, nn.RNNBase) else came
    return {f"output {n}": _array(x.detach().cpu()) for n, x in enumerate(kept)}


def _array(x: Tensor) -> np.ndarray[Any, Any]:
    """Return the same numbers in a type that NumPy has."""
    x = x.dequantize() if x.is_quantized else x.to_dense()
    return np.asarray((x.float() if x.dtype == torch.bfloat16 else x.resolve_conj()).numpy())


def candidates(
    found: Examination, wanted: Wanted, depth: int | None
) -> tuple[Iterator[Plan], tuple[Skipped, ...]]:
    """Return plans for ε, then for smaller ones where the module amplifies, and what stays.

    A ``depth`` that the user chose is the only plan.

    Raises:
        UnsupportedModelError: No stack has a depth on the evidence that is wanted.
    """
    if depth is not None:
        stays = tuple(each for stack in found.stacks for each in wanted.stays(stack))
        return iter([chosen(found, depth, wanted)]), stays
    first, kept = plans(found, wanted)

    def stricter() -> Iterator[Plan]:
        yield from islice(first, TRIES)
        for share in STRICTER[1:]:
            try:
                more, _ = plans(found, replace(wanted, eps=wanted.eps / share))
            except UnsupportedModelError:
                return
            yield from islice(more, TRIES)

    return stricter(), kept


def first_to_pass(
    module: nn.Module,
    found: Examination,
    order: Iterator[Plan],
    calls: Sequence[Call],
    *,
    shape: Shape,
    progress: Progress | None,
) -> Swap:
    """Cut copies of a module until one agrees within ε; return the last tried where none does.

    Without calls each recurrence is compared on fresh synthetic inputs of its own.
    """
    swap: Swap | None = None
    for number, plan in enumerate(order):
        if progress is not None:
            progress("comparing" if number == 0 else "comparing a deeper truncation", 0.0)
        forms = export.choose(found.model, plan.depths, shape, found.seen.lengths)
        truncated = copied(module)
        cut(truncated, module, found.model, plan, forms)
        seed = found.settings.seed + 1  # the same for every plan
        pairs = [(module, truncated, call) for call in calls]
        pairs = pairs or _synthetic(module, truncated, found, plan, seed)
        judged = _compared(pairs, found.settings.eps)
        swap = Swap(truncated, plan, forms, judged)
        if judged.passed:
            break
    assert swap is not None
    return swap


def _compared(pairs: Sequence[tuple[nn.Module, nn.Module, Call]], eps: float) -> Equivalence:
    """Call originals and truncated modules alike, and judge the largest difference.

    Copies are called, which may keep a state from one call to the next.
    """
    fresh = {each: copied(each) for pair in pairs for each in pair[:2]}
    wanted = [outputs_of(fresh[original], call) for original, _, call in pairs]
    got = [outputs_of(fresh[truncated], call) for _, truncated, call in pairs]
    tried = [
        _tried(n, call, time_first=_time_first(original))
        for n, (original, _, call) in enumerate(pairs)
    ]
    judged = judge(wanted, got, eps, tried)
    return judged.equivalence(eps, "PyTorch's own modules")


def _synthetic(
    module: nn.Module, truncated: nn.Module, found: Examination, plan: Plan, seed: int
) -> list[tuple[nn.Module, nn.Module, Call]]:
    """Pair what is called on fresh synthetic inputs: the module if it is one stack, else its parts.

    Where depths are proved the inputs stay in the domain of the proof.
    """
    pairs: list[tuple[nn.Module, nn.Module, Call]] = []
    for stack, domain in zip(found.model.stacks, found.domains, strict=True):
        original = found.model.source[stack.name]
        if not isinstance(original, nn.RNNBase):
            continue
        low, high = domain.box(stack.input_size) if plan.evidence == "proved" else (None, None)
        x = synthetic(
            stack.input_size, sequences=BATCH, length=LENGTH, seed=seed, low=low, high=high
        ).to(next(original.parameters()))
        call = (x if original.batch_first else x.transpose(0, 1),)
        if found.model.whole:
            return [(module, truncated, call)]
        pairs.append((original, truncated.get_submodule(_name(module, original)), call))
    return pairs


def _tried(number: int, call: Call, *, time_first: bool) -> Tried:
    shape = next((tuple(x.shape) for x in call if isinstance(x, Tensor) and x.dim() > 1), (1, 1))
    batch, steps = (shape[1], shape[0]) if time_first else (shape[0], shape[1])
    return Tried(f"call {number}", batch, steps)


def copied(module: nn.Module) -> nn.Module:
    """Copy a module with its parameters.

    Raises:
        UnsupportedModelError: It cannot be copied, as a weight is computed by a hook.
    """
    try:
        return copy.deepcopy(module)
    except RuntimeError as error:
        raise UnsupportedModelError(
            f"the module must be one that copy.deepcopy copies, got {brief(error)}",
            help="torch.nn.utils.parametrizations replaces the hooks of torch.nn.utils",
        ) from error


def cut(
    truncated: nn.Module,
    original: nn.Module,
    model: Model,
    plan: Plan,
    forms: Mapping[str, Form],
) -> None:
    """Cut the recurrences of a module in place; ``model`` was read from ``original``."""
    depths = plan.depths
    for stack in model.stacks:
        if not any(r.label in depths for r in stack.recurrences()):
            continue
        part = truncated.get_submodule(_name(original, model.source[stack.name]))
        assert isinstance(part, nn.RNNBase)
        cuts = tuple(
            tuple(
                Cut(depths[r.label], forms[layer.recurrences[0].label].block)
                if r.label in depths
                else None
                for r in layer.recurrences
            )
            for layer in stack.layers
        )
        truncate_(part, cuts)


def _name(module: nn.Module, part: nn.Module) -> str:
    names: dict[nn.Module, str] = {each: name for name, each in module.named_modules()}
    return names[part]
