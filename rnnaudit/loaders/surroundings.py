"""What stands around the recurrences in a state_dict: a linear head, or more than that.

A state_dict does not say how its modules are wired. One linear layer is taken for the
readout only when nothing else can be meant: it alone follows the recurrences in the order
in which the modules were made, and reads exactly what the last of them gives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rnnaudit.findings import finding
from rnnaudit.loaders.exact import UnreadableError, exact, overclaims
from rnnaudit.loaders.grouping import Group, wrappers
from rnnaudit.loaders.interface import listed
from rnnaudit.model import Readout, Stack
from rnnaudit.results import Finding

_START = re.compile(
    r"[hcs]_?0|init(?:ial)?_?(?:[hcs]|hidden|state|cell)(?:_state)?|(?:hidden|cell)_?(?:state|init)"
)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The tensors of a model that belong to no recurrence, as modules of named leaves.

    ``before`` were made before the last recurrence, ``after`` after it; where the order is
    not that of construction (``ordered`` is false), all but embeddings are in ``after``.
    """

    before: Mapping[str, Mapping[str, Tensor]]
    after: Mapping[str, Mapping[str, Tensor]]
    ordered: bool


def surroundings(
    read: Sequence[Group],
    dropped: Sequence[Group],
    tensors: Mapping[str, Tensor],
    *,
    ordered: bool,
) -> Surroundings:
    """Collect what is not recurrent: floating-point tensors under the same wrapper as the stacks.

    Args:
        read: The recurrent modules that were read.
        dropped: Copies of them that were not, whose surroundings are left out too.
        tensors: All tensors by name, in the order of the file.
        ordered: Whether that is the order in which the modules were made.
    """
    own = {name for group in read for name in group.keys.values()}
    roots = {group.root for group in read}
    others = {group.root for group in dropped} - roots
    names = list(tensors)
    last = max(i for i, name in enumerate(names) if name in own)
    before: dict[str, dict[str, Tensor]] = {}
    after: dict[str, dict[str, Tensor]] = {}
    for i, name in enumerate(names):
        tensor = tensors[name]
        over = wrappers(name)
        root = next((root for root in reversed(over) if root in roots), None)
        if name in own or root is None or not others.isdisjoint(over):
            continue
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        module, _, leaf = name.removeprefix(root).rpartition(".")
        follows = i > last if ordered else "emb" not in module.lower()
        (after if follows else before).setdefault(module, {})[leaf] = tensor
    return Surroundings(before, after, ordered)


def readout(around: Surroundings, stacks: Sequence[Stack]) -> Readout | None:
    """Return the one linear layer that follows the last stack, where nothing else can be meant.

    Raises:
        LoadError: Its weights are NaN or infinite.
    """
    width = stacks[-1].output_size
    if len(around.after) != 1 or any(stack.output_size == width for stack in stacks[:-1]):
        return None
    [(module, leaves)] = around.after.items()
    weight, bias = leaves.get("weight"), leaves.get("bias")
    if weight is None or weight.ndim != 2 or leaves.keys() - {"weight", "bias"}:
        return None
    if weight.shape[1] != width or 0 in weight.shape:
        return None
    if bias is not None and bias.shape != weight.shape[:1]:
        return None
    try:
        A = exact(f"{module}.weight", weight)
        if bias is None:
            return Readout(module, A, torch.zeros(A.shape[0], dtype=torch.float64))
        return Readout(module, A, exact(f"{module}.bias", bias))
    except UnreadableError:
        return None


def not_audited(around: Surroundings, where: str) -> tuple[Finding, ...]:
    """Say what follows the recurrences when that is not one linear layer."""
    if not around.after:
        return ()
    names = [module or next(iter(leaves)) for module, leaves in around.after.items()]
    stand = "follows" if around.ordered else "stands beside"
    return (
        finding(
            "RA122",
            where,
            f"no readout is taken: what {stand} the recurrence ({listed(names)}) is not one "
            "linear layer of its width, and these files do not say how it is wired",
        ),
    )


def other_starts(around: Surroundings, stacks: Sequence[Stack]) -> tuple[Finding, ...]:
    """Warn of tensors that look like an initial state, which the audit does not use.

    One that is all zero starts the model where the audit starts, and may be a buffer in
    which the state is kept between calls.
    """
    widths = {
        width
        for stack in stacks
        for r in stack.recurrences()
        for width in (r.cell.hidden_size, r.cell.state_size - r.cell.hidden_size)
    }
    findings = []
    for modules in (around.before, around.after):
        for module, leaves in modules.items():
            for leaf, tensor in leaves.items():
                if not is_start(leaf) or tensor.ndim == 0 or tensor.shape[-1] not in widths:
                    continue
                where = f"{module}.{leaf}" if module else leaf
                shape = tuple(tensor.shape)
                if not overclaims(tensor) and tensor.any():
                    text = f"looks like a learned initial state (shape {shape})"
                    findings.append(finding("RA123", where, f"{text}; the audit starts from zero"))
                else:
                    text = f"a state of zeros (shape {shape}) that the model may keep between calls"
                    findings.append(finding("RA124", where, text))
    return tuple(findings)


def is_start(leaf: str) -> bool:
    """Whether a parameter's own name is one that people give to an initial state."""
    return _START.fullmatch(leaf) is not None
