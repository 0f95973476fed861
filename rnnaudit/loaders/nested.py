"""A checkpoint is dicts in dicts: find its named tensors, and leave the optimizer's out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from rnnaudit.errors import LoadError

Leaf = TypeVar("Leaf")

MOST_NODES = 2_000_000
MOST_DEPTH = 64


def named_tensors(checkpoint: object) -> dict[str, Tensor]:
    """Return every tensor under its path, dots between keys, in the order of the file.

    Dicts, lists and tuples are walked, each once however often it is referred to. What an
    optimizer keeps (a dict of ``state`` and ``param_groups``, or a key that begins with
    ``optim``) is left out: its moments are shaped like weights and are none.

    Raises:
        LoadError: Nested deeper than 64 levels, or with more than two million entries.
    """
    return {path: tensor.detach() for path, tensor in _walk(checkpoint, Tensor)}


def modules(checkpoint: object) -> dict[str, nn.Module]:
    """Return every module under its path; those inside another module stay in there.

    Raises:
        LoadError: As for `named_tensors`.
    """
    return dict(_walk(checkpoint, nn.Module))


def _walk(checkpoint: object, kind: type[Leaf]) -> Iterator[tuple[str, Leaf]]:
    """Yield what is of a kind, in the order of the file."""
    seen: set[int] = set()
    nodes = 0
    todo: list[tuple[str, object, int]] = [("", checkpoint, 0)]
    while todo:
        path, node, depth = todo.pop()
        nodes += 1
        if nodes > MOST_NODES or depth > MOST_DEPTH:
            raise LoadError(
                "a checkpoint of named tensors was expected, and this one is nested too deeply "
                f"({depth} levels, {nodes} entries)",
                help="save the model's state_dict on its own",
            )
        if isinstance(node, kind):
            yield path, node
            continue
        children = _children(node)
        if not children or id(node) in seen or _is_optimizer(node):
            continue
        seen.add(id(node))
        todo.extend(
            (f"{path}.{key}" if path else key, child, depth + 1)
            for key, child in reversed(children)
            if isinstance(child, kind | Mapping | list | tuple) and not key.startswith("optim")
        )


def _children(node: object) -> list[tuple[str, object]]:
    if isinstance(node, Mapping):
        return [(str(key), child) for key, child in node.items() if isinstance(key, str | int)]
    if isinstance(node, list | tuple) and not isinstance(node, torch.Size):
        return [(str(i), child) for i, child in enumerate(node)]
    return []


def _is_optimizer(node: object) -> bool:
    return isinstance(node, Mapping) and "param_groups" in node and "state" in node
