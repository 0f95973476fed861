"""Claim: what an LSTM remembers is measured, and searched for, within minutes.

    depth       every depth of 100 sequences × 1,000 steps, all positions, default LSTM of
                H = 128: < 60 s
    long        the same for an LSTM that needs a depth near 512: < 480 s, and cut where a
                time budget says so
    spectrum    the 10 largest Lyapunov exponents, H = 512, 1,000 steps: < 20 s and 1 GB
    adversary   64 starts up to depth 64, H = 128: < 60 s

Each runs once, in processor time of one thread, which other programs disturb least; the
resident set is of a process of its own. The peer is what one would write first: the model
itself on every window for every depth, QR of Jacobians that autodiff forms and that are kept,
and Adam on the same window from as many starts. It runs on a slice, and its time for the
whole is extrapolated. The limit is matrix products with as many multiplications.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from rnnaudit.cells import multiplications
from rnnaudit.cells.chain import Chain
from rnnaudit.depth import DepthStudy, study_recurrence
from rnnaudit.estimators import spectrum
from rnnaudit.estimators.adversary import refute
from rnnaudit.evidence import measured_depth
from rnnaudit.model import InitialState, LSTMCell, Recurrence

INPUTS = 16
LIMITS = {"depth": 60.0, "long": 480.0, "spectrum": 20.0, "adversary": 60.0}
MOST_BYTES = 1e9
HOLD = 4.3
"""Forget bias with which the default LSTM needs about 512 steps."""


def main() -> int:
    """Print one line per claim, and return 1 where one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--quick", action="store_true", help="a tenth of the sequences")
    parser.add_argument("--only", choices=LIMITS, help="one claim")
    arguments = parser.parse_args()
    rows = []
    for what in [arguments.only] if arguments.only else LIMITS:
        with multiprocessing.get_context("spawn").Pool(1) as fresh:
            row = fresh.apply(measure, (what, 10 if arguments.quick else 1))
        rows.append(row)
        if not arguments.json:
            peer, limit = row["peer_seconds"], row["limit_seconds"]
            print(
                f"{what:10} {row['seconds']:6.1f} s of {LIMITS[what]:.0f}   "
                f"{row['bytes'] / 1e6:5.0f} MB   peer about {peer:.0f} s (extrapolated)   "
                f"limit {limit:.1f} s   {row['found']}",
                flush=True,
            )
    passed = all(row["seconds"] < LIMITS[row["what"]] for row in rows)
    passed &= all(row["bytes"] < MOST_BYTES for row in rows if row["what"] == "spectrum")
    if arguments.json:
        print(json.dumps({"passed": passed, "torch": torch.__version__, "rows": rows}, indent=2))
    else:
        print("claim holds" if passed else "claim fails")
    return 0 if passed else 1


def measure(what: str, share: int) -> dict[str, object]:
    """Run ours once; return processor seconds, the resident set's peak, peer and limit."""
    torch.set_num_threads(1)
    run, peer, products = {
        "depth": depth,
        "long": long,
        "spectrum": exponents,
        "adversary": adversary,
    }[what](share)
    start = time.process_time()
    found = run()
    seconds = time.process_time() - start
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "what": what,
        "seconds": seconds,
        "bytes": peak,
        "found": found,
        "peer_seconds": peer(),
        "limit_seconds": products / rate(),
    }


Claim = tuple[Callable[[], str], Callable[[], float], float]


def default_lstm(H: int, hold: float = 0.0) -> tuple[Recurrence, nn.LSTM]:
    """Return PyTorch's default initialisation under seed 0, ``hold`` added to forget biases."""
    torch.manual_seed(0)
    lstm = nn.LSTM(INPUTS, H, batch_first=True).double().requires_grad_(requires_grad=False)
    lstm.bias_ih_l0[H : 2 * H] += hold
    cell = LSTMCell(lstm.weight_ih_l0, lstm.weight_hh_l0, lstm.bias_ih_l0 + lstm.bias_hh_l0)
    start = InitialState(torch.zeros(2 * H, dtype=torch.float64))
    return Recurrence("lstm", 0, cell, start), lstm


def rate() -> float:
    """Return multiplications per second of a matrix product of these sizes in float64."""
    a, b = torch.randn(2048, 128).double(), torch.randn(128, 512).double()
    start = time.process_time()
    for _ in range(20):
        a @ b
    return 20 * 2048 * 128 * 512 / (time.process_time() - start)


def timed(run: Callable[[], object]) -> float:
    """Return processor seconds."""
    start = time.process_time()
    run()
    return time.process_time() - start


def depth(share: int) -> Claim:
    """Measure every depth of a model that forgets soon."""
    return every_depth(*default_lstm(128), 100 // share, about=20)


def long(share: int) -> Claim:
    """Measure every depth of a model that needs about 512 steps, whole and within a second."""
    recurrence, lstm = default_lstm(128, HOLD)
    run, peer, products = every_depth(recurrence, lstm, 100 // share, about=512)

    def and_cut() -> str:
        cut = study_recurrence(recurrence, inputs(2, 1000), budget_s=1.0)
        return f"{run()}; cut after 1 s: {labelled(cut)}"

    return and_cut, peer, products


def labelled(study: DepthStudy) -> str:
    """Say what a study claims."""
    found = measured_depth(study, 1e-3)
    known = f"k(1e-3) = {found.k}" if found.k is not None else f"k(1e-3) > {found.longer_than}"
    return f"{known}, {'complete' if study.complete else 'labelled incomplete'}"


def inputs(sequences: int, steps: int) -> Tensor:
    """Draw N(0, 1)."""
    return torch.randn(sequences, steps, INPUTS, dtype=torch.float64)


def every_depth(recurrence: Recurrence, lstm: nn.LSTM, sequences: int, about: int) -> Claim:
    """Return the study, PyTorch's module on windows, and what ``about`` depths multiply."""
    T, k, some = 1000, 50, 100
    x = inputs(sequences, T)
    windows = x[0].unfold(0, k, 1)[:some].transpose(1, 2)

    def run() -> str:
        study = study_recurrence(recurrence, x)
        return f"{labelled(study)}, {study.errors.shape[1]} depths"

    def peer() -> float:  # the sum of k over all windows of all depths is T³/6
        return timed(lambda: lstm(windows)) / (some * k) * sequences * T**3 / 6

    steps = sequences * sum(T - j for j in range(about))
    return run, peer, float(steps) * multiplications(recurrence.cell)


def exponents(share: int) -> Claim:
    """Measure the ten largest exponents; the peer keeps every Jacobian."""
    recurrence, lstm = default_lstm(512)
    T, H, few = 1000 // share, 512, 4
    x = inputs(1, T)

    def step(s: Tensor, z: Tensor) -> Tensor:
        i, f, g, o = (z + lstm.weight_hh_l0 @ s[:H]).chunk(4)
        c = f.sigmoid() * s[H:] + i.sigmoid() * g.tanh()
        return torch.cat([o.sigmoid() * c.tanh(), c])

    def stacked() -> None:
        s, V = x.new_zeros(2 * H), torch.eye(2 * H, 10, dtype=x.dtype)
        kept = []
        for t in range(few):
            z = lstm.weight_ih_l0 @ x[0, t] + lstm.bias_ih_l0 + lstm.bias_hh_l0
            kept.append(torch.func.jacrev(step)(s, z))
            s = step(s, z)
        for J in kept:
            V = torch.linalg.qr(J @ V).Q

    def run() -> str:
        values = spectrum(recurrence, x, count=10).values
        return f"from {values[0]:.3f} to {values[-1]:.3f}"

    products = 11.0 * T * multiplications(recurrence.cell)
    return run, lambda: timed(stacked) / few * T, products


def adversary(share: int) -> Claim:
    """Search for inputs that refute a depth; the peer runs Adam on one window."""
    recurrence, lstm = default_lstm(128)
    starts, k, prefix, few = 64 // share, 64, 64, 4
    high = torch.ones(INPUTS, dtype=torch.float64)

    def run() -> str:
        found = refute(Chain.of([recurrence]), -high, high, horizon=k, restarts=starts)
        return f"no k(1e-3) < {found.refuted_below(1e-3)} on |x| ≤ 1"

    def adam() -> None:
        x = inputs(starts, prefix + k).clamp(-1, 1).requires_grad_()
        ascent = torch.optim.Adam([x], lr=0.05, maximize=True)
        for _ in range(few):
            ascent.zero_grad()
            gap = lstm(x)[0][:, -1] - lstm(x[:, prefix:])[0][:, -1]
            gap.norm(dim=-1).sum().backward()
            ascent.step()

    # Of every ascent step: both runs, and a gradient of twice their cost.
    runs = 3 * starts * (prefix + 2 * k) * 40
    return run, lambda: timed(adam) / few * 160, float(runs) * multiplications(recurrence.cell)


if __name__ == "__main__":
    sys.exit(main())
