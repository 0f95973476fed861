"""Claim: what a default LSTM remembers is measured, and searched for, within a minute each.

    depth       every depth of 100 sequences × 1,000 steps, all positions, H = 128: < 60 s
    spectrum    the 10 largest Lyapunov exponents, H = 512, 1,000 steps: < 20 s and 1 GB
    adversary   64 starts up to depth 64, H = 128: < 60 s

Each runs once, in processor time of one thread, which other programs disturb least.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable

import torch

from rnnaudit.cells.chain import Chain
from rnnaudit.depth import study_recurrence
from rnnaudit.estimators import spectrum
from rnnaudit.estimators.adversary import refute
from rnnaudit.evidence import measured_depth
from rnnaudit.model import InitialState, LSTMCell, Recurrence

INPUTS = 16
LIMITS = {"depth": 60.0, "spectrum": 20.0, "adversary": 60.0}
MOST_BYTES = 1e9


def main() -> int:
    """Print one line per claim, and return 1 where one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--quick", action="store_true", help="a tenth of the sequences")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    share = 10 if arguments.quick else 1
    rows = [depth(100 // share), exponents(1000 // share), adversary(64 // share)]
    passed = all(row["seconds"] < LIMITS[row["what"]] for row in rows)
    passed &= rows[1]["bytes"] < MOST_BYTES
    if arguments.json:
        print(json.dumps({"passed": passed, "torch": torch.__version__, "rows": rows}, indent=2))
    else:
        for row in rows:
            limit = LIMITS[row["what"]]
            print(f"{row['what']:10} {row['seconds']:6.1f} s of {limit:.0f}   {row['found']}")
        print("claim holds" if passed else "claim fails")
    return 0 if passed else 1


def default_lstm(H: int) -> Recurrence:
    """Return PyTorch's default initialisation under seed 0."""
    torch.manual_seed(0)
    lstm = torch.nn.LSTM(INPUTS, H).double().requires_grad_(requires_grad=False)
    cell = LSTMCell(lstm.weight_ih_l0, lstm.weight_hh_l0, lstm.bias_ih_l0 + lstm.bias_hh_l0)
    return Recurrence("lstm", 0, cell, InitialState(torch.zeros(2 * H, dtype=torch.float64)))


def timed(what: str, run: Callable[[], str]) -> dict[str, object]:
    """Run once; return processor seconds, the growth of the resident set, and what came."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    found = run()
    seconds = time.process_time() - start
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return {"what": what, "seconds": seconds, "bytes": grown, "found": found}


def depth(sequences: int) -> dict[str, object]:
    """Measure every depth."""
    recurrence = default_lstm(128)
    x = torch.randn(sequences, 1000, INPUTS, dtype=torch.float64)

    def run() -> str:
        study = study_recurrence(recurrence, x)
        return f"k(1e-3) = {measured_depth(study, 1e-3).k}, {study.errors.shape[1]} depths"

    return timed("depth", run)


def exponents(steps: int) -> dict[str, object]:
    """Measure the ten largest exponents."""
    recurrence = default_lstm(512)
    x = torch.randn(1, steps, INPUTS, dtype=torch.float64)

    def run() -> str:
        values = spectrum(recurrence, x, count=10).values
        return f"from {values[0]:.3f} to {values[-1]:.3f}"

    return timed("spectrum", run)


def adversary(restarts: int) -> dict[str, object]:
    """Search for inputs that refute a depth."""
    chain = Chain.of([default_lstm(128)])
    high = torch.ones(INPUTS, dtype=torch.float64)

    def run() -> str:
        found = refute(chain, -high, high, horizon=64, restarts=restarts)
        return f"no k(1e-3) < {found.refuted_below(1e-3)} on |x| ≤ 1"

    return timed("adversary", run)


if __name__ == "__main__":
    sys.exit(main())
