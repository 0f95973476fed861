"""What each form costs: products, elementwise work, and a fixed price for every node.

With w = k − 1 steps of warm-up, T steps and N sequences:

    window    k (ν + T·N·r) + w σ + T·N·d
    chunk     (w + C) (ν + (B·N + 4) (r + d)) + β,    B = ⌈(T − w)/C⌉ blocks
    filter    T·N·k·d′ + φ
    operator  T·N·d + T (ω + (N + 4) p + N·f)

where ν is the price of a step's nodes and σ that of a shift's, d and r those of a row's
product with x and of its product with h and its functions, β that of the nodes that cut
time into blocks, φ that of those around a convolution and d′ that of one tap; reading the
weights costs as much as four more rows. The last form is a chunk of few steps. The operator
is the recurrence as it was, ω the price of its step, p and f those of a row's product with h
and of its functions there; gated operators read their weights for about one row.

The constants are those of ONNX Runtime on one core with AVX-512, fitted to 800 graphs of Elman,
GRU and LSTM layers of 8 to 256 units, up to 1024 steps. They need to be right only in
proportion: nine of ten estimates of a form against the operator were right to a factor of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rnnaudit.model import Cell

CALL = 15.0
"""Microseconds of a call of a graph, whatever it holds."""

NODE = 0.4
"""Microseconds until an operator has started."""

PRODUCT = 1e-5
"""Microseconds of one multiplication or addition inside a matrix product."""

FUNCTION = 9e-4
"""Microseconds for one number of a gate, from pre-activation to state."""

MEMORY = 4e-3
"""The same where a layer of numbers does not fit into a core's cache."""

CACHE = 2**18
"""Numbers of a layer that do."""

WEIGHTS = 4
"""Rows whose products take as long as reading the weights."""

LONGEST = 512
"""Steps that a block may have: its graph grows with them."""

_GATES = {"elman": 1, "gru": 3, "lstm": 4}
_NODES = {"elman": 5, "gru": 14, "lstm": 14}
_SHIFTS = {"elman": 2, "gru": 2, "lstm": 4}
_BLOCKS = 30  # nodes that cut time into blocks and put it together again
_FILTER = 6  # nodes around a convolution
_OPERATOR = 0.1  # microseconds of a step inside the runtime's own operator
_INSIDE = {"elman": 8e-3, "gru": 2.5e-3, "lstm": 1.5e-3}  # of one number of a gate there
_READING = {"elman": 4.0, "gru": 1.3, "lstm": 1.3}  # rows as long as reading the weights there


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs in microseconds of truncating one recurrence of a layer."""

    cell: Cell
    depth: int
    keep_ops: bool = False

    def window(self, steps: int, batch: int = 1) -> float:
        """Return the cost of the window form."""
        rows = steps * batch
        steps_cost = self.depth * (NODE * _NODES[self.cell.kind] + rows * self._recurrent(rows))
        shifts = (self.depth - 1) * NODE * _SHIFTS[self.cell.kind]
        return steps_cost + shifts + rows * self._drive()

    def chunk(self, steps: int, block: int, batch: int = 1) -> float:
        """Return the cost of the chunk form with blocks of ``block`` steps."""
        warm_up = self.depth - 1
        rows = batch * max(1, math.ceil((steps - warm_up) / block))
        if self.keep_ops:
            step = self._operator(rows) + (rows + WEIGHTS) * self._drive()
        else:
            nodes = NODE * _NODES[self.cell.kind]
            step = nodes + (rows + WEIGHTS) * (self._recurrent(rows) + self._drive())
        return _BLOCKS * NODE + (warm_up + block) * step

    def operator(self, steps: int, batch: int = 1) -> float:
        """Return the cost of the recurrence as it was: the runtime's own operator."""
        return steps * (self._operator(batch) + batch * self._drive())

    def filter(self, steps: int, batch: int = 1) -> float:
        """Return the cost of a linear cell's convolution."""
        products = 2 * self.depth * (self.cell.input_size + 1) * self.cell.hidden_size
        return _FILTER * NODE + PRODUCT * steps * batch * products

    def best_block(self, steps: int, batch: int = 1) -> int:
        """Return the C that costs least, among powers of two and their halfway points."""
        sizes = sorted({c * 2**i for i in range(10) for c in (2, 3)} | {1})
        return min(
            (size for size in sizes if size <= LONGEST),
            key=lambda size: self.chunk(steps, size, batch),
        )

    def _operator(self, rows: int) -> float:
        """Return the cost of one step of the runtime's own operator, without the drive."""
        kind = self.cell.kind
        product = PRODUCT * 2 * self.cell.hidden_size
        return _OPERATOR + self._numbers() * (
            product * (rows + _READING[kind]) + rows * _INSIDE[kind]
        )

    def _numbers(self) -> int:
        """Return the pre-activations of one step."""
        cell = self.cell
        return _GATES[cell.kind] * max(cell.hidden_size, cell.state_size - cell.hidden_size)

    def _drive(self) -> float:
        return PRODUCT * 2 * self.cell.input_size * self._numbers()

    def _recurrent(self, rows: int) -> float:
        numbers = self._numbers()
        each = FUNCTION if rows * numbers <= CACHE else MEMORY
        return numbers * (PRODUCT * 2 * self.cell.hidden_size + each)
