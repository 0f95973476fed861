"""The conditions of the literature, by their names, so that they can be compared.

They bound infinity norms: |δh| and |δc| by one number each. All assume σ gates and tanh.

- Miller & Hardt, *Stable Recurrent Models*, ICLR 2019: one-step constant of an LSTM.
- Terzi, Bonassi, Farina & Scattolini, *Learning model predictive control with long
  short-term memory networks*, 2021: δISS of an LSTM.
- Bonassi, Farina & Scattolini, *On the stability properties of gated recurrent units neural
  networks*, 2021: δISS of a GRU, in residual form. It is stated for the reset before the
  recurrent product; for the reset after it (PyTorch) r multiplies U_n h + c_n, so that its
  first factor and n̄ change.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rnnaudit.certificates.comparison import OF_NORMS, ComparisonCertificate, contracting_weights
from rnnaudit.certificates.interface import Search
from rnnaudit.certificates.intervals import Interval, apply
from rnnaudit.certificates.loops import Place
from rnnaudit.model import SIGMOID, TANH, GRUCell, LSTMCell
from rnnaudit.norms import TINY, gamma, up

_ROOM = 1 + 1e-13
"""Covers the handful of roundings between bounds that are themselves rounded up."""


def row_norm(U: Tensor) -> float:
    """Bound ‖U‖_∞, the largest sum of a row's sizes, from above."""
    if not U.numel():
        return 0.0
    sums = U.abs().sum(1) * (1 + 2 * gamma(U.shape[1] + 2)) + U.shape[1] * TINY
    return float(sums.max())


def _certificate(
    method: str, domain: str, M: list[list[float]], box: Tensor, cell: LSTMCell | GRUCell
) -> ComparisonCertificate | None:
    """Certify a comparison matrix of norms, the first of which is that of h."""
    matrix = torch.tensor(M, dtype=torch.float64) * _ROOM
    found = contracting_weights(matrix)
    if found is None:
        return None
    P = cell.hidden_size
    parts = [box.max()[None]] if len(M) == 1 else [box[:P].max()[None], box[P:].max()[None]]
    return ComparisonCertificate(
        method, domain, matrix, *found, torch.cat(parts), cell.hidden_size, norm=OF_NORMS
    )


def published_lstm(
    cell: LSTMCell, place: Place, box: Tensor, *, domain: str, search: Search
) -> None:
    """Try the conditions of Miller & Hardt and of Terzi et al. on a plain LSTM.

    Args:
        cell: The cell.
        place: Where the gates can be over all reachable states.
        box: Bound [S] on |s − s_start|.
        domain: The domain's name.
        search: Collects the proofs.
    """
    plain = cell.peephole is None and cell.projection is None and not cell.input_forget
    standard = (cell.gate, cell.candidate, cell.squash) == (SIGMOID, TANH, TANH)
    if not plain or not standard or cell.clip is not None:
        return
    f, i, o = (_largest(apply(SIGMOID, place.pre[k])) for k in "fio")
    g = _largest(apply(TANH, place.pre["g"]))
    c, squashed = _largest(place.state["c"]), _largest(apply(TANH, place.state["c_next"]))
    n_i, n_f, n_g, n_o = (row_norm(U) for U in cell.U.split(cell.cell_size))
    room = math.nextafter(1 - f, 0)
    if not room > 0:
        search.fail("Miller–Hardt", "the forget gate can reach 1")
        search.fail("δISS (Terzi et al.)", "the forget gate can reach 1")
        return
    # |c| ≤ 1 / (1 − f̄) in place of c̄, and 1 in place of ī, ḡ, ō and tanh(c̄).
    constant = f + n_f * max(up(1 / room), c) / 4 + n_i / 4 + n_g + n_o / 4
    alpha = n_f * c / 4 + i * n_g + n_i * g / 4
    # Order (h, c): |δc'| ≤ f̄|δc| + α|δh|, |δh'| ≤ ō|δc'| + ¼ tanh(c̄)‖U_o‖|δh|.
    iss = [[o * alpha + squashed * n_o / 4, o * f], [alpha, f]]
    for method, M in (("Miller–Hardt", [[constant]]), ("δISS (Terzi et al.)", iss)):
        found = _certificate(method, domain, M, box, cell)
        if found is not None:
            search.certificates.append(found)
            continue
        radius = float(torch.linalg.eigvals(torch.tensor(M).double()).abs().max())
        what = "one-step constant" if len(M) == 1 else "spectral radius"
        search.fail(method, f"its {what} is {radius:.4g}, not below 1")


def published_gru(cell: GRUCell, place: Place, box: Tensor, *, domain: str, search: Search) -> None:
    """Try the condition of Bonassi et al. on a GRU, corrected where the reset comes after.

    Arguments are those of ``published_lstm``.
    """
    if (cell.gate, cell.candidate) != (SIGMOID, TANH) or cell.clip is not None:
        return
    U_r, U_z, U_n = (row_norm(U) for U in cell.U.split(cell.hidden_size))
    r, z = (_largest(apply(SIGMOID, place.pre[k])) for k in "rz")
    n, h = _largest(apply(TANH, place.pre["n"])), _largest(place.state["h"])
    if cell.reset_after:
        # n = tanh(W_n x + b + r(U_n h + c)): r's own slope multiplies U_n h + c.
        factor = U_n * r + U_r / 4 * _largest(place.state["q"])
    else:
        factor = U_n * (r + U_r * h / 4)
    method = "δISS (Bonassi et al.)" + (", reset after" if cell.reset_after else "")
    # |δ'| ≤ z|δ| + (1 − z) factor |δ| + ¼(h̄ + n̄)‖U_z‖|δ|, and z at its largest is worst
    # where the factor is below 1.
    rate = z + max(0.0, 1 - z) * factor + (h + n) * U_z / 4
    if factor < 1 and z < 1:
        found = _certificate(method, domain, [[rate]], box, cell)
        if found is not None:
            search.certificates.append(found)
            return
    search.fail(method, f"its one-step constant is {max(rate, factor):.4g}, not below 1")


def _largest(box: Interval) -> float:
    return float(box.size.max())
