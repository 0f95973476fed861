"""Claim: PyTorch's default nn.RNN is proved stable in seconds, with useful depths.

ε = 1e-3. In the 2-norm of h from any ‖Δh₀‖₂ ≤ √H, `nn.RNN(32, H)`: k ≤ 44 at H = 64 within
10 s, ≤ 53 at H = 256 within 60 s. Per unit of h with |h| ≤ 1, `nn.RNN(16, n)`: k ≤ 37 at
n = 32, ≤ 43 at n = 128. With ``--large`` also H = 512 within 180 s, its certificate checked
within 5 s. The peer is the classical bound, ‖W‖₂ < 1, which proves nothing here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's, before it is imported

import torch

from rnnaudit.certificates import Domain, certify, check, document
from rnnaudit.model import ElmanCell, InitialState, Recurrence

ANY = Domain(-math.inf, math.inf, "any input")
CLAIMS = ((32, 64, "ball", 44, 10.0), (32, 256, "ball", 53, 60.0))
PER_UNIT = ((16, 32, "unit", 37, 10.0), (16, 128, "unit", 43, 60.0))
LARGE = ((32, 512, "ball", 70, 180.0),)


def main() -> int:
    """Print every claim beside what is proved, and return 1 where one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--large", action="store_true", help="go on to H = 512")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = [measure(*claim) for claim in CLAIMS + PER_UNIT + (LARGE if arguments.large else ())]
    if arguments.json:
        print(json.dumps({"claim": __doc__.splitlines()[0], "rows": rows}))
    else:
        print("           model  norm    ‖W‖₂       λ     k wanted      s  check s")
        for r in rows:
            print(
                f"{r['model']:>16} {r['norm']:>5} {r['spectral_norm']:7.3f} {r['rate']:7.3f} "
                f"{r['k']:5d} {r['wanted']:6d} {r['seconds']:6.1f} {r['check_seconds']:8.2f}"
            )
    failed = [r["model"] for r in rows if not r["holds"]]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def measure(inputs: int, hidden: int, norm: str, wanted: int, limit: float) -> dict[str, Any]:
    """Certify one default nn.RNN, and check its certificate."""
    torch.manual_seed(0)
    module = torch.nn.RNN(inputs, hidden).double()
    W, U = module.weight_hh_l0.detach(), module.weight_ih_l0.detach()
    cell = ElmanCell(W, U, (module.bias_ih_l0 + module.bias_hh_l0).detach())
    start = InitialState(torch.zeros(hidden, dtype=torch.float64))
    recurrence = Recurrence("rnn", 0, cell, start)
    begin = time.perf_counter()
    proofs = certify(recurrence, ANY)
    ball = {"norm": "2", "radius": math.sqrt(hidden)} if norm == "ball" else {}
    k = proofs.depth(1e-3, **ball)
    seconds = time.perf_counter() - begin
    text = document(recurrence, ANY, proofs)
    begin = time.perf_counter()
    check(text, recurrence)
    checking = time.perf_counter() - begin
    return {
        "model": f"nn.RNN({inputs}, {hidden})",
        "norm": norm,
        "spectral_norm": float(torch.linalg.matrix_norm(W, ord=2)),
        "rate": proofs.best.bound.value,
        "k": k,
        "wanted": wanted,
        "seconds": seconds,
        "check_seconds": checking,
        "holds": k is not None and k <= wanted and seconds <= limit and checking <= 5,
    }


if __name__ == "__main__":
    sys.exit(main())
