"""A traced step as algebra: every value an affine map of atoms, with exact coefficients.

Atoms are the entries of the input and of the state, the results of activations, and
products of two values that both vary. Whatever moves, adds or multiplies by constants only
changes coefficients. A coefficient that float64 would round ends the attempt; only what is
added to a bias may be rounded, as where a loader adds two biases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rnnaudit.cells.operators import Value, apply, kind_of
from rnnaudit.model import Activation, Operation, TracedCell

MOST = 4096
"""Entries of a value; each block of atoms starts as an identity of that size."""

_ACTIVATIONS = {
    "Tanh": "tanh",
    "Sigmoid": "sigmoid",
    "Relu": "relu",
    "LeakyRelu": "leakyrelu",
    "HardSigmoid": "hardsigmoid",
    "Elu": "elu",
    "Softsign": "softsign",
    "Softplus": "softplus",
}
_MOVES = frozenset(
    {"Identity", "Dropout", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Split"}
    | {"Slice", "Gather", "Expand", "Tile"}
)


CLIP = "clip"
"""What bounds a value to ±alpha: no activation of a cell, but part of one's pre-activations."""


class Unlike(Exception):  # noqa: N818 -- an answer, not an error
    """The step is not of the form that is looked for."""


@dataclass(frozen=True, slots=True, eq=False)
class Atoms:
    """A block of atoms; ``of`` is the argument of an activation, or the factors of a product."""

    kind: Literal["one", "input", "state", "activation", "product"]
    size: int
    activation: Activation | None = None
    of: tuple[Form, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """Σ coefficient · atom: for each block its coefficients [block size, *shape]."""

    shape: tuple[int, ...]
    parts: Mapping[Atoms, Tensor]

    def at(self, indices: Sequence[int]) -> Form:
        """Return the entries [n] at these places of the flattened value."""
        chosen = {b: p.reshape(b.size, -1)[:, list(indices)] for b, p in self.parts.items()}
        return Form((len(indices),), {b: p for b, p in chosen.items() if bool(p.any())})

    def of(self, block: Atoms) -> Tensor:
        """Return a block's coefficients, zero where the form has none."""
        return self.parts.get(block, torch.zeros(block.size, *self.shape, dtype=torch.float64))

    def equals(self, other: Form) -> bool:
        """Whether both are the same map of the same atoms."""
        blocks = {*self.parts, *other.parts}
        return self.shape == other.shape and all(
            torch.equal(self.of(b), other.of(b)) for b in blocks
        )


def joined(forms: Sequence[Form]) -> Form:
    """Lay the flattened forms side by side."""
    blocks = dict.fromkeys(b for form in forms for b in form.parts)
    parts = {
        b: torch.cat([form.of(b).reshape(b.size, -1) for form in forms], dim=1) for b in blocks
    }
    return Form((sum(math.prod(form.shape) for form in forms),), parts)


class Algebra:
    """The forms of a traced step's values.

    Attributes:
        one, input, state: The blocks that are there from the start.
        after: The next state, its parts side by side.
        rounded: Whether a sum of biases was rounded.
    """

    def __init__(self, cell: TracedCell) -> None:
        """Follow every operation.

        Raises:
            Unlike: An operator that is no part of the algebra, or a rounded coefficient.
        """
        if max(cell.state_size, cell.input_size) > MOST:
            raise Unlike
        self.one = Atoms("one", 1)
        self.input = Atoms("input", cell.input_size)
        self.state = Atoms("state", cell.state_size)
        self.rounded = False
        self._made: dict[object, list[Atoms]] = {}
        self._constants = cell.constants
        self._forms: dict[str, Form] = {}
        for block, ports in ((self.input, cell.inputs), (self.state, cell.states)):
            rows = torch.eye(block.size, dtype=torch.float64).split([p.size for p in ports], dim=1)
            for port, part in zip(ports, rows, strict=True):
                if port.kind == "float":
                    shaped = part.reshape(block.size, *port.shape)
                    self._forms[port.name] = Form(port.shape, {block: shaped})
        for operation in cell.operations:
            self._forms |= zip(operation.outputs, self._results(operation), strict=False)
        self.after = joined([self._form(name) for name in cell.next_states])

    def _form(self, name: str) -> Form:
        if name in self._forms:
            return self._forms[name]
        constant = self._constants.get(name)
        if constant is None or not constant.is_floating_point():
            raise Unlike
        return Form(tuple(constant.shape), {self.one: constant.unsqueeze(0)})

    def _results(self, operation: Operation) -> Sequence[Form]:
        op, names = operation.op, operation.inputs
        if op in _MOVES or op == "Cast":
            if op == "Cast" and kind_of(int(str(operation.attributes["to"]))) != torch.float64:
                raise Unlike
            return self._moved(operation)
        if op == "Concat":
            return [self._side_by_side(operation)]
        if op in {"Add", "Sub", "Sum"}:
            return [self._sum(op, [self._form(name) for name in names])]
        if op == "Neg":
            return [_negated(self._form(names[0]))]
        if op == "Mul":
            return [self._product(*names)]
        if op == "MatMul":
            return [self._matmul(*names)]
        if op == "Gemm":
            return [self._gemm(operation)]
        return [self._activation(self._form(names[0]), self._named(operation))]

    def _moved(self, operation: Operation) -> Sequence[Form]:
        form, rest = self._form(operation.inputs[0]), operation.inputs[1:]
        if any(name and name not in self._constants for name in rest):
            raise Unlike
        given = [Value(self._constants[n], False) if n else None for n in rest]
        results: list[dict[Atoms, Tensor]] = [{} for _ in operation.outputs]
        for block, part in form.parts.items():
            moved = apply(
                operation.op,
                operation.attributes,
                [Value(part, True), *given],
                len(operation.outputs),
            )
            for found, value in zip(results, moved, strict=False):
                found[block] = value.tensor
        return [
            Form(tuple(next(iter(found.values())).shape[1:]), found) for found in results if found
        ]

    def _side_by_side(self, operation: Operation) -> Form:
        forms = [self._form(name) for name in operation.inputs]
        parts = {}
        for block in dict.fromkeys(b for form in forms for b in form.parts):
            values = [Value(form.of(block), True) for form in forms]
            parts[block] = apply("Concat", operation.attributes, values, 1)[0].tensor
        return Form(tuple(next(iter(parts.values())).shape[1:]), parts)

    def _sum(self, op: str, forms: Sequence[Form]) -> Form:
        total = forms[0]
        for form in forms[1:]:
            addend = _negated(form) if op == "Sub" else form
            both = [self._broadcast(f, total.shape, form.shape) for f in (total, addend)]
            parts = {}
            for block in dict.fromkeys(b for f in both for b in f.parts):
                a, b = both[0].of(block), both[1].of(block)
                parts[block] = a + b
                # Knuth's TwoSum: the error of a float64 sum, itself exact.
                late = parts[block] - a
                if bool(((a - (parts[block] - late)) + (b - late)).any()):
                    if block is not self.one:
                        raise Unlike
                    self.rounded = True
            total = Form(both[0].shape, parts)
        return total

    def _broadcast(self, form: Form, *shapes: tuple[int, ...]) -> Form:
        shape = tuple(torch.broadcast_shapes(*shapes))
        if shape == form.shape:
            return form
        padded = (1,) * (len(shape) - len(form.shape)) + form.shape
        parts = {
            b: p.reshape(b.size, *padded).expand(b.size, *shape) for b, p in form.parts.items()
        }
        return Form(shape, parts)

    def _scaled(self, form: Form, by: Tensor) -> Form:
        """Multiply by constants; the product of two float32 numbers is exact in float64."""
        wide = self._broadcast(form, form.shape, tuple(by.shape))
        if not _narrow(by) or not all(_narrow(part) for part in wide.parts.values()):
            raise Unlike
        return Form(wide.shape, {b: p * by for b, p in wide.parts.items()})

    def _product(self, a: str, b: str) -> Form:
        for name, other in ((a, b), (b, a)):
            if name in self._constants:
                return self._scaled(self._form(other), self._constants[name])
        left, right = self._form(a), self._form(b)
        both = tuple(self._broadcast(form, left.shape, right.shape) for form in (left, right))
        return self._block(Atoms("product", math.prod(both[0].shape), of=both))

    def _matmul(self, a: str, b: str) -> Form:
        if b in self._constants:
            return self._times(self._form(a), self._constants[b], -1)
        if a in self._constants:
            return self._times(self._form(b), self._constants[a], -2)
        raise Unlike

    def _times(self, form: Form, W: Tensor, axis: int) -> Form:
        """Multiply by a stored matrix along an axis; exact where each entry is one atom or none."""
        if W.ndim != 2 or len(form.shape) < 2:
            raise Unlike
        parts = {}
        for block, part in form.parts.items():
            single = bool(((part != 0).sum(axis) <= 1).all())
            if not (single and bool(((part == 0) | (part.abs() == 1)).all())):
                if block is not self.one:
                    raise Unlike
                self.rounded = True
            parts[block] = part @ W if axis == -1 else W @ part
        return Form(tuple(next(iter(parts.values())).shape[1:]), parts)

    def _gemm(self, operation: Operation) -> Form:
        a, b, *bias = operation.inputs
        plain = {"alpha": 1.0, "beta": 1.0, "transA": 0}
        if b not in self._constants or any(
            operation.attributes.get(name, value) != value for name, value in plain.items()
        ):
            raise Unlike
        W = self._constants[b]
        product = self._times(self._form(a), W.T if operation.attributes.get("transB") else W, -1)
        return self._sum("Add", [product, self._form(bias[0])]) if bias and bias[0] else product

    def _named(self, operation: Operation) -> Activation:
        """Return the activation that an operator is.

        Clip to [0, 1] is a hard sigmoid, and to [−c, c] what ``CLIP`` names, alpha = c.
        """
        if operation.op == "Clip":
            bounds: list[object] = [
                self._constants[name].item() if (name in self._constants) else None
                for name in operation.inputs[1:]
            ] or [operation.attributes.get(k) for k in ("min", "max")]
            if bounds == [0.0, 1.0]:
                return Activation("hardsigmoid", 1.0, 0.0)
            if None in bounds or len(bounds) != 2:
                raise Unlike
            low, high = (float(str(bound)) for bound in bounds)
            if low != -high or not 0 < high < math.inf:
                raise Unlike
            return Activation(CLIP, high)
        if operation.op not in _ACTIVATIONS:
            raise Unlike
        given = {
            k: float(str(v)) for k, v in operation.attributes.items() if k in {"alpha", "beta"}
        }
        return Activation(_ACTIVATIONS[operation.op], given.get("alpha"), given.get("beta"))

    def _activation(self, form: Form, activation: Activation) -> Form:
        return self._block(Atoms("activation", math.prod(form.shape), activation, (form,)))

    def _block(self, made: Atoms) -> Form:
        """Return new atoms as a form; those that were made before are the same atoms."""
        if made.size > MOST:
            raise Unlike
        among = self._made.setdefault(_sort(made), [])
        block = next((old for old in among if _same(old, made)), made)
        if block is made:
            among.append(made)
        shape = made.of[0].shape
        return Form(shape, {block: torch.eye(made.size, dtype=torch.float64).reshape(-1, *shape)})


def _sort(made: Atoms) -> object:
    """Return what atoms must share to be the same: their kind, and the blocks they are made of."""
    blocks = (
        frozenset(b for b, part in form.parts.items() if bool(part.any())) for form in made.of
    )
    return made.kind, made.activation, tuple(blocks)


def _same(a: Atoms, b: Atoms) -> bool:
    return (a.kind, a.activation) == (b.kind, b.activation) and all(
        left.equals(right) for left, right in zip(a.of, b.of, strict=True)
    )


def _negated(form: Form) -> Form:
    return Form(form.shape, {block: -part for block, part in form.parts.items()})


def _narrow(values: Tensor) -> bool:
    """Whether float32 holds every number."""
    return torch.equal(values.float().double(), values)


Factor = tuple[Atoms, tuple[int, ...]]
"""Atoms of a block, one for each unit."""

Polynomial = dict[tuple[Factor, ...], float]
"""Coefficients of products of factors, the same for every unit."""


def polynomial(form: Form) -> Polynomial:
    """Write a form [n] as one polynomial that every unit shares, products multiplied out.

    Raises:
        Unlike: The units differ, or mix.
    """
    total: Polynomial = {}
    for block, part in form.parts.items():
        if not bool(part.any()):
            continue
        places = part.abs().argmax(0)
        coefficient = part[places, torch.arange(part.shape[1])]
        if bool((coefficient != coefficient[0]).any()) or bool(((part != 0).sum(0) != 1).any()):
            raise Unlike
        indices = tuple(int(i) for i in places)
        for monomial, c in _expanded(block, indices).items():
            total[monomial] = total.get(monomial, 0.0) + c * float(coefficient[0])
    return {monomial: c for monomial, c in total.items() if c}


def _expanded(block: Atoms, indices: tuple[int, ...]) -> Polynomial:
    if block.kind == "one":
        return {(): 1.0}
    if block.kind != "product":
        return {((block, indices),): 1.0}
    left, right = (polynomial(form.at(indices)) for form in block.of)
    result: Polynomial = {}
    for a, c in left.items():
        for b, d in right.items():
            key = tuple(sorted((*a, *b), key=lambda f: (id(f[0]), f[1])))
            result[key] = result.get(key, 0.0) + c * d
    return result
