"""Claim: a default nn.LSTM(16, 64) is proved stable with all weights scaled by 0.29.

The largest scale s, in steps of 0.01, at which each method proves contraction for |x| ≤ 1,
for nn.LSTM and nn.GRU of the seed 0 with H = 16 and 64 (``--all`` adds 128). The peers are the
published conditions, evaluated on the same set of states as ours.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

import torch

from rnnaudit.certificates import Domain, certify
from rnnaudit.model import GRUCell, InitialState, LSTMCell, Recurrence

INPUTS, STEP, WANTED = 16, 0.01, 0.29


def main() -> int:
    """Print the largest scale of every method, and return 1 where the claim fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--all", action="store_true", help="go on to H = 128")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows: dict[str, dict[str, float]] = {}
    for kind in ("LSTM", "GRU"):
        for hidden in (16, 64, 128) if arguments.all else (16, 64):
            rows[f"nn.{kind}({INPUTS}, {hidden})"] = largest(kind, hidden)
    if arguments.json:
        print(json.dumps({"claim": __doc__.splitlines()[0], "largest_scale": rows}))
    else:
        for model, scales in rows.items():
            print(model)
            for method, scale in sorted(scales.items(), key=lambda entry: -entry[1]):
                print(f"    {method:40} {scale:5.2f}")
    reached = max(rows[f"nn.LSTM({INPUTS}, 64)"].values())
    if reached < WANTED:
        print(f"failed: {reached:.2f} reached, wanted {WANTED}", file=sys.stderr)
        return 1
    return 0


def largest(kind: str, hidden: int) -> dict[str, float]:
    """Bisect the largest scale of every method; proofs at one scale serve all methods."""
    proved: dict[int, frozenset[str]] = {}
    known: set[str] = set()

    def methods(step: int) -> frozenset[str]:
        if step not in proved:
            found = certify(scaled(kind, hidden, step * STEP), Domain())
            proved[step] = frozenset(c.method for c in found.certificates)
            known.update(proved[step])
            known.update(name for name, _ in found.failures if name not in ("summary", "states"))
        return proved[step]

    methods(2)
    return {method: STEP * _bisect(lambda k, m=method: m in methods(k)) for method in sorted(known)}


def _bisect(holds: Callable[[int], bool]) -> int:
    low, high = 0, 64
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def scaled(kind: str, hidden: int, scale: float) -> Recurrence:
    """Return a default module's recurrence with all weights and biases times ``scale``."""
    torch.manual_seed(0)
    module = getattr(torch.nn, kind)(INPUTS, hidden).double()
    W, U, b, c = (
        scale * getattr(module, f"{name}_l0").detach()
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    cell = LSTMCell(W, U, b + c) if kind == "LSTM" else GRUCell(W, U, b, c)
    return Recurrence("rnn", 0, cell, InitialState(torch.zeros(cell.state_size).double()))


if __name__ == "__main__":
    sys.exit(main())
