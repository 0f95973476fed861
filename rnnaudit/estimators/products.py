"""The r-step norm sup ‖J_r … J_1‖₂ along trajectories: what decides once ‖J‖₂ > 1."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rnnaudit import cells
from rnnaudit.estimators.power_iteration import (
    BLOCK,
    DOWN,
    converge,
    dense_norms,
    screen,
)
from rnnaudit.model import Cell, Recurrence
from rnnaudit.results import NormCurve

LONGEST = 256
_EXACT = 32  # state dimension up to which all windows' products are formed
_FLOPS = 1.5e9  # spent on screening the windows of each r
_STEPS = 4096  # … on at most so many Jacobians
_FINALISTS = 4
_REFINE = 8  # steps that refine a finalist: each runs its window twice
_PROMISING = 64  # the same, where products are explicit
_RESIDUAL = 1e-3  # relative, of σ²: the value errs by its square where there is a gap
_LOG_MOST = 690.0  # e^690 is the last power that float64 holds with room to round


@dataclass(frozen=True, slots=True, eq=False)
class _Dense:
    """Explicit matrices P [M, S, S]."""

    P: Tensor

    def jvp(self, V: Tensor) -> Tensor:
        """Apply each matrix to rows V [M, m, S]."""
        return V @ self.P.mT

    def vjp(self, V: Tensor) -> Tensor:
        """Apply its transpose."""
        return V @ self.P


class _Product:
    """J_r … J_1 for windows of r steps, each factor scaled so that long products stay finite."""

    def __init__(self, cell: Cell, s: Tensor, z: Tensor, log_scale: Tensor | None = None) -> None:
        """Linearise at states s [M, r, S] under drives z [M, r, Z].

        ``log_scale`` [M, r] divides each factor; without it a random tangent measures it.
        """
        self.factors = [cells.linearize(cell, s[:, t], z[:, t]) for t in range(s.shape[1])]
        self.log_scale = self._measured(s) if log_scale is None else log_scale
        self._down = (-self.log_scale).exp()

    def _measured(self, s: Tensor) -> Tensor:
        rng = torch.Generator().manual_seed(0)
        V = torch.randn(len(s), BLOCK, s.shape[-1], generator=rng, dtype=torch.float64)
        scales = []
        for factor in self.factors:
            V = factor.jvp(V)
            size = V.abs().amax((1, 2))
            size = torch.where(size > 0, size, torch.ones_like(size))
            V = V / size.view(-1, 1, 1)
            scales.append(size.log())
        return torch.stack(scales, dim=1)

    def jvp(self, V: Tensor) -> Tensor:
        """Apply the scaled product to rows V [M, m, S]."""
        for t, factor in enumerate(self.factors):
            V = factor.jvp(V) * self._down[:, t].view(-1, 1, 1)
        return V

    def vjp(self, V: Tensor) -> Tensor:
        """Apply its transpose."""
        for t in range(len(self.factors) - 1, -1, -1):
            V = self.factors[t].vjp(V) * self._down[:, t].view(-1, 1, 1)
        return V


def norm_curve(
    recurrence: Recurrence, x: Tensor, *, seed: int = 0, budget_s: float | None = None
) -> NormCurve:
    """Return the largest ‖J_r … J_1‖₂ found for r = 1, 2, 4, … ≤ min(256, T) on x [N, T, I].

    A lower bound on the supremum over trajectories. In small cells every window is taken;
    in larger ones seeded windows are screened, the best of half the length among them, and
    the most promising brought to the residual. A norm beyond float64 ends the curve, and the
    first r that ends after ``budget_s`` seconds.
    """
    end = None if budget_s is None else time.monotonic() + budget_s
    cell = recurrence.cell
    x = cells.reads(recurrence, x)
    start = recurrence.initial.value
    after = cells.trajectory(cell, x, start)
    s = torch.cat([start.expand(len(x), 1, -1), after[:, :-1]], dim=1)
    finite = s.isfinite().all(-1).all(-1)
    s, z = s[finite], cells.drive(cell, x[finite])
    steps: list[int] = []
    values: list[float] = []
    if len(s):
        exact = cell.state_size <= _EXACT
        logs = _by_products(cell, s, z, seed) if exact else _by_windows(cell, s, z, seed)
        for r, log_norm in logs:
            if not log_norm <= _LOG_MOST:
                break
            steps.append(r)
            values.append(math.exp(log_norm) * DOWN)
            if end is not None and time.monotonic() >= end:
                break
    return NormCurve(tuple(steps), tuple(values))


def longest(T: int) -> int:
    """Return the largest r of a curve on sequences of T steps."""
    return max(_lengths(T), default=0)


def _lengths(T: int) -> Iterator[int]:
    r = 1
    while r <= min(T, LONGEST):
        yield r
        r *= 2


def _by_products(cell: Cell, s: Tensor, z: Tensor, seed: int) -> Iterator[tuple[int, float]]:
    """Yield r and log sup‖·‖₂ over all windows, by doubling: P_2r(t) = P_r(t + r) P_r(t)."""
    rng = torch.Generator().manual_seed(seed)
    group = max(1, 16384 // s.shape[1])
    s, z = s[:group], z[:group]
    P = cells.linearize(cell, s, z).matrix()
    log_scale = P.new_zeros(P.shape[:2])
    for r in _lengths(s.shape[1]):
        if r > 1:
            half = r // 2
            P = P[:, half:] @ P[:, :-half]
            log_scale = log_scale[:, half:] + log_scale[:, :-half]
        size = P.abs().amax((-1, -2))
        size = torch.where(size > 0, size, torch.ones_like(size))
        P, log_scale = P / size[..., None, None], log_scale + size.log()
        matrices, scale = P.flatten(0, 1), log_scale.flatten()
        V = torch.randn(len(matrices), BLOCK, P.shape[-1], generator=rng, dtype=torch.float64)
        V = V[:, : P.shape[-1]]
        found = screen(_Dense(matrices), V, 3)[0].log() + scale
        best = found.topk(min(_PROMISING, len(found))).indices
        exact = dense_norms(matrices[best]).log() + scale[best]
        yield r, float(torch.maximum(exact.max(), found.max()))


def _by_windows(cell: Cell, s: Tensor, z: Tensor, seed: int) -> Iterator[tuple[int, float]]:
    """Yield r and the largest log‖·‖₂ over seeded windows, matrix-free."""
    rng = torch.Generator().manual_seed(seed)
    N, T, S = s.shape
    steps = int(min(_STEPS, _FLOPS / (24 * cells.multiplications(cell))))
    best = torch.zeros(0, 2, dtype=torch.long)
    for r in _lengths(T):
        starts = T - r + 1
        chosen = torch.randperm(N * starts, generator=rng)[: max(8, steps // r)]
        which, when = chosen // starts, chosen % starts
        # The best windows of half this length, as this one's first and as its second half.
        around = torch.cat([best, best - torch.tensor([0, r // 2])])
        around = around[(around[:, 1] >= 0) & (around[:, 1] + r <= T)]
        windows = torch.cat([torch.stack([which, when], dim=1), around])
        rows = windows[:, 0].unsqueeze(1), windows[:, 1].unsqueeze(1) + torch.arange(r)
        states, drives = s[rows], z[rows]
        V = torch.randn(len(windows), BLOCK, S, generator=rng, dtype=torch.float64)
        product = _Product(cell, states, drives)
        scale = product.log_scale.sum(1)
        norms, V = screen(product, V, 2)
        finalists = (norms.log() + scale).topk(min(_FINALISTS, len(windows))).indices

        def select(
            chosen: Tensor,
            finalists: Tensor = finalists,
            states: Tensor = states,
            drives: Tensor = drives,
            product: _Product = product,
        ) -> _Product:
            of = finalists[chosen]
            return _Product(cell, states[of], drives[of], product.log_scale[of])

        found = converge(select, V[finalists, :1], tol=_RESIDUAL, most=_REFINE)
        found = torch.maximum(found, norms[finalists])
        best = windows[finalists]
        yield r, float((found.log() + scale[finalists]).max())
