"""One step of PyTorch's own cells in any precision, and the fused kernels that run many.

``drive`` maps the inputs of all steps to their part of the pre-activations once; ``step``
goes on from there. Gates are stacked as in PyTorch: r, z, n and i, f, g, o.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

State = tuple[Tensor, ...]
"""(h,) of an Elman cell or a GRU, (h, c) of an LSTM, each [..., width]."""


class Weights(NamedTuple):
    """One direction of one layer, as nn.RNNBase names it; None for what it lacks."""

    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None
    weight_hr: Tensor | None = None

    @property
    def widths(self) -> tuple[int, int]:
        """Widths of h and of c (of h again where there is no projection)."""
        hidden = self.weight_hh.shape[1]
        return hidden, hidden if self.weight_hr is None else self.weight_hr.shape[1]


def drive(mode: str, weights: Weights, x: Tensor) -> Tensor:
    """Map inputs x [..., I] to their part of the pre-activations [..., G·H].

    Both biases are in it, but for a GRU's recurrent one, which its reset gate multiplies.
    """
    bias = weights.bias_ih
    if bias is not None and weights.bias_hh is not None and mode != "GRU":
        bias = bias + weights.bias_hh
    return torch.nn.functional.linear(x, weights.weight_ih, bias)


def step(mode: str, weights: Weights, s: State, z: Tensor) -> State:
    """Return the state that follows ``s`` under the drive z [..., G·H]."""
    return _STEPS[mode](weights, s, z)


def _elman(activation: Callable[[Tensor], Tensor]) -> Callable[[Weights, State, Tensor], State]:
    def next_state(weights: Weights, s: State, z: Tensor) -> State:
        return (activation(z + s[0] @ weights.weight_hh.mT),)

    return next_state


def _gru(weights: Weights, s: State, z: Tensor) -> State:
    u = torch.nn.functional.linear(s[0], weights.weight_hh, weights.bias_hh)
    (x_r, x_z, x_n), (u_r, u_z, u_n) = z.chunk(3, dim=-1), u.chunk(3, dim=-1)
    update = torch.sigmoid(x_z + u_z)
    candidate = torch.tanh(x_n + torch.sigmoid(x_r + u_r) * u_n)
    return (candidate + update * (s[0] - candidate),)


def _lstm(weights: Weights, s: State, z: Tensor) -> State:
    h, c = s
    i, f, g, o = (z + h @ weights.weight_hh.mT).chunk(4, dim=-1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return (h if weights.weight_hr is None else h @ weights.weight_hr.mT), c


_STEPS: Mapping[str, Callable[[Weights, State, Tensor], State]] = {
    "RNN_TANH": _elman(torch.tanh),
    "RNN_RELU": _elman(torch.relu),
    "GRU": _gru,
    "LSTM": _lstm,
}

_FUSED: Mapping[str, str] = {
    "RNN_TANH": "rnn_tanh",
    "RNN_RELU": "rnn_relu",
    "GRU": "gru",
    "LSTM": "lstm",
}


def fused(mode: str, weights: Weights, x: Tensor, start: State) -> tuple[Tensor, State]:
    """Run PyTorch's own kernel over x [T, N, I]; return h [T, N, H] and the final state."""
    states = [part.unsqueeze(0) for part in start]
    parameters = [part for part in weights if part is not None]
    kernel = getattr(torch._VF, _FUSED[mode])
    biased = weights.bias_ih is not None
    hx = states if mode == "LSTM" else states[0]
    gradients = torch.is_grad_enabled()
    y, *final = kernel(x, hx, parameters, biased, 1, 0.0, gradients, False, False)
    return y, tuple(part.squeeze(0) for part in final)
