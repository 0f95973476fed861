"""nn.RNN, nn.GRU and nn.LSTM that see their last k inputs: same call, results and state_dict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from rnnaudit.modules.forms import Cut, truncated
from rnnaudit.modules.steps import State, Weights

Cuts = tuple[tuple[Cut | None, ...], ...]
"""How each layer is cut, its directions side by side; None where it runs in full."""


class Truncated(nn.RNNBase):
    """What `truncate_` makes of an nn.RNN, nn.GRU or nn.LSTM.

    A given ``hx`` is where those windows start that reach the start of the sequence; every
    other one starts from zero. Packed sequences of one length run together.
    """

    cuts: Cuts

    def forward(self, input: Any, hx: Any = None) -> Any:  # noqa: A002 (PyTorch's own names)
        """Run the truncated layers, as the module that they replace would be called."""
        if isinstance(input, PackedSequence):
            return self._packed(input, hx)
        batched = input.dim() != 2
        time = 1 if self.batch_first and batched else 0
        x = input.transpose(0, time) if batched else input.unsqueeze(1)
        self.check_input(x, None)
        if x.shape[0] == 0:
            raise ValueError("a truncated module must be given at least one step, got none")
        start = self._start(x, hx, batched)
        y, final = self._layers(x, start)
        y = y.transpose(0, time) if batched else y.squeeze(1)
        if not batched:
            final = tuple(part.squeeze(1) for part in final)
        return y, final if self.mode == "LSTM" else final[0]

    def extra_repr(self) -> str:
        """Add how each layer is cut to what PyTorch says."""
        cuts = [cut for layer in self.cuts for cut in layer]
        depths, blocks = ([cut and getattr(cut, n) for cut in cuts] for n in ("depth", "block"))
        return f"{super().extra_repr()}, depth={_short(depths)}, block={_short(blocks)}"

    def _get_name(self) -> str:
        return f"Truncated{self.mode.split('_')[0]}"

    def _start(self, x: Tensor, hx: Any, batched: bool) -> State | None:
        """Return the caller's state as parts [layers · directions, N, width]."""
        if hx is None:
            return None
        parts = tuple(hx) if self.mode == "LSTM" else (hx,)
        if not batched:
            parts = tuple(part.unsqueeze(1) for part in parts)
        rows = self.num_layers * (1 + self.bidirectional)
        widths = (self.proj_size or self.hidden_size, self.hidden_size)
        wanted = [(rows, x.shape[1], width) for width in widths[: len(parts)]]
        if wanted != [tuple(part.shape) for part in parts]:
            raise ValueError(f"hx must have shapes {wanted}, got {[tuple(p.shape) for p in parts]}")
        return parts

    def _layers(self, x: Tensor, start: State | None) -> tuple[Tensor, State]:
        """Run x [T, N, I] through all layers."""
        finals: list[State] = []
        for number, cuts in enumerate(self.cuts):
            outputs = []
            for direction, cut in enumerate(cuts):
                each = number * len(cuts) + direction
                y, final = truncated(
                    self.mode,
                    self._weights(each),
                    x.flip(0) if direction else x,
                    None if start is None else tuple(part[each] for part in start),
                    cut,
                )
                outputs.append(y.flip(0) if direction else y)
                finals.append(final)
            x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
            if self.dropout and self.training and number < self.num_layers - 1:
                x = nn.functional.dropout(x, self.dropout)
        return x, tuple(torch.stack(parts) for parts in zip(*finals, strict=True))

    def _weights(self, each: int) -> Weights:
        """Return the weights of one layer and direction, as parametrizations make them."""
        names = self._all_weights[each]
        return Weights(**{_part(name): getattr(self, name) for name in names})

    def _packed(self, packed: PackedSequence, hx: Any) -> Any:
        """Run sequences of one length together."""
        x, lengths = pad_packed_sequence(packed)
        parts = None if hx is None else (tuple(hx) if self.mode == "LSTM" else (hx,))
        rows, outputs, finals = [], [], []
        for length in lengths.unique():
            same = (lengths == length).nonzero()[:, 0].to(x.device)
            start = None if parts is None else tuple(part[:, same] for part in parts)
            y, final = self._layers(x[: int(length), same], start)
            rows.append(same)
            outputs.append(nn.functional.pad(y, (0, 0, 0, 0, 0, len(x) - int(length))))
            finals.append(final)
        order = torch.cat(rows).argsort()
        y = torch.cat(outputs, dim=1)[:, order]
        final = tuple(torch.cat(part, dim=1)[:, order] for part in zip(*finals, strict=True))
        sort = packed.sorted_indices
        if sort is not None:
            y, lengths = y[:, sort], lengths[sort.cpu()]
        data = pack_padded_sequence(y, lengths).data
        result = PackedSequence(data, packed.batch_sizes, sort, packed.unsorted_indices)
        return result, final if self.mode == "LSTM" else final[0]


def truncate_(module: nn.RNNBase, cuts: Cuts) -> None:
    """Make a recurrent module a truncated one in place: its parameters and hooks stay.

    Parametrized weights stay parametrized, and their parametrizations can be removed.
    """
    kind = type(module)
    if parametrize.is_parametrized(module):
        (original,) = kind.__bases__
        own = {k: v for k, v in vars(kind).items() if k not in {"__dict__", "__weakref__"}}
        kind = type(kind.__name__, (_truncated(original),), own)
    else:
        kind = _truncated(kind)
    module.__class__ = kind
    module.cuts = cuts


def _truncated(kind: type) -> type:
    """Return the class that takes a class's place; one of the user's keeps its other methods."""
    plain = kind in {nn.RNN, nn.GRU, nn.LSTM}
    return Truncated if plain else type(f"Truncated{kind.__name__}", (Truncated, kind), {})


def _short(values: Sequence[object]) -> str:
    """Write one number where all are the same."""
    return str(values[0]) if len(set(values)) == 1 else str(list(values))


def _part(name: str) -> str:
    """Return ``weight_ih`` of ``weight_ih_l0_reverse``."""
    return name[:9] if name.startswith("weight") else name[:7]
