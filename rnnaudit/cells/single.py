"""Stacks in float32: what rounding alone does to outputs that are otherwise read in float64."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from rnnaudit.cells.rollout import run_stack
from rnnaudit.model import Cell, Readout, Stack

_Weights = TypeVar("_Weights", Cell, Readout)


def run_single(stack: Stack, x: Tensor) -> Tensor:
    """Return the outputs [N, T, O] of a stack on x [N, T, I], computed in float32 throughout."""
    layers = tuple(
        replace(
            layer,
            recurrences=tuple(replace(r, cell=_single(r.cell)) for r in layer.recurrences),
        )
        for layer in stack.layers
    )
    readout = None if stack.readout is None else _single(stack.readout)
    return run_stack(replace(stack, layers=layers, readout=readout), x.float())


def _single(weights: _Weights) -> _Weights:
    """Return a copy whose weights are float32: what a file of that type stores, exactly."""
    made = copy.copy(weights)
    for field in fields(weights):
        object.__setattr__(made, field.name, _rounded(getattr(weights, field.name)))
    return made


def _rounded(value: object) -> object:
    if isinstance(value, Tensor):
        return value.float() if value.dtype == torch.float64 else value
    if isinstance(value, Mapping):
        return {name: _rounded(entry) for name, entry in value.items()}
    return value
