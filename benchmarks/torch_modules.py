"""Claim: a truncated nn.LSTM in chunk form runs at least 2.5 times as fast as nn.LSTM.

LSTM 64 → 256, T = 8000, batch 1, k = 32, float32, in PyTorch, without gradients. The limit is
one matrix product with as many multiplications, those of the warm-up included; the fused kernel
packs its weights and may beat it. All run in turn within one process, and medians are compared:
of processor time on one thread, which other programs disturb least, of wall time on more.
``--table`` goes on over T, H and k, with the window form and a step of training beside it.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rnnaudit.export.costs import Costs
from rnnaudit.model import LSTMCell
from rnnaudit.modules import Cut, truncate_

INPUTS, T, H, K = 64, 8000, 256, 32
FASTER = 2.5
TABLE = ((256, 1024, 8000), (32, 128, 256), (8, 32, 128))
CHUNK, TRAINED = "chunk", "training: chunk"


def main() -> int:
    """Print ours, the original and the limit side by side, and return 1 where the claim fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="go on over T, H and k")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    cases = [(T, H, K), *(itertools.product(*TABLE) if arguments.table else ())]
    rows = [
        measure(*case, repeats=arguments.repeats, whole=arguments.table, threads=arguments.threads)
        for case in cases
    ]
    passed = rows[0]["times_faster"][CHUNK] >= FASTER
    if arguments.json:
        versions = {"torch": torch.__version__, "threads": arguments.threads}
        print(json.dumps({"passed": passed, **versions, "rows": rows}))
        return 0 if passed else 1
    print(f"nn.LSTM {INPUTS} → H, batch 1, float32, {arguments.threads} thread(s), medians in ms")
    print("    T    H    k    C    nn.LSTM      limit   then ours, and how many times as fast")
    for row in rows:
        sizes = f"{row['T']:5d} {row['H']:4d} {row['k']:4d} {row['block']:4d}"
        ours = "   ".join(
            f"{name} {row['ms'][name]:.2f} ({times:.2f}×)"
            for name, times in row["times_faster"].items()
        )
        print(f"{sizes} {row['ms']['nn.LSTM']:10.2f} {row['ms']['limit']:10.2f}   {ours}")
    print(f"claim: {'holds' if passed else f'FAILS: wanted {FASTER} times'}")
    return 0 if passed else 1


def measure(
    steps: int, hidden: int, k: int, *, repeats: int, threads: int, whole: bool
) -> dict[str, Any]:
    """Time the forms, the original and the limit in turn; check first what they compute."""
    torch.manual_seed(0)
    module = nn.LSTM(INPUTS, hidden, batch_first=True)
    with torch.no_grad():  # it forgets fast, so that every form agrees with the original
        module.weight_hh_l0 *= 0.5
    cell = LSTMCell(
        *(p.detach().double() for p in (module.weight_ih_l0, module.weight_hh_l0)),
        (module.bias_ih_l0 + module.bias_hh_l0).detach().double(),
    )
    block = Costs(cell, k, keep_ops=True).best_block(steps)
    chunk, window = (copy.deepcopy(module) for _ in range(2))
    truncate_(chunk, ((Cut(k, block),),))
    truncate_(window, ((Cut(k),),))
    x = torch.randn(1, steps, INPUTS)
    for truncated in (chunk, window):
        with torch.no_grad():
            error = float((truncated(x[:, :k])[0] - module(x[:, :k])[0]).abs().max())
        if not error <= 1e-5:
            raise SystemExit(f"a form errs by {error:g}")
    rows = round(steps * (1 + (k - 1) / block))
    factors = torch.ones(rows, INPUTS + hidden), torch.ones(INPUTS + hidden, 4 * hidden)
    runs: dict[str, Callable[[], object]] = {
        "nn.LSTM": lambda: module(x),
        "limit": lambda: factors[0] @ factors[1],
        CHUNK: lambda: chunk(x),
    }
    peers = {CHUNK: "nn.LSTM"}
    if whole:
        runs |= {
            "window": lambda: window(x),
            "training": lambda: trained(module, x),
            TRAINED: lambda: trained(chunk, x),
        }
        peers |= {"window": "nn.LSTM", TRAINED: "training"}
    ms = medians_ms(runs, repeats=repeats, threads=threads)
    faster = {name: ms[peer] / ms[name] for name, peer in peers.items()}
    return {"T": steps, "H": hidden, "k": k, "block": block, "ms": ms, "times_faster": faster}


def trained(module: nn.Module, x: torch.Tensor) -> None:
    """Take one gradient of the sum of all outputs."""
    with torch.enable_grad():
        module(x)[0].sum().backward()


@torch.no_grad()
def medians_ms(
    runs: dict[str, Callable[[], object]], *, repeats: int, threads: int
) -> dict[str, float]:
    """Run all in turn, ``repeats`` rounds after one to warm up."""
    clock = time.process_time if threads == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(repeats + 1):
        for name, run in runs.items():
            start = clock()
            run()
            if round_:
                times[name].append(1e3 * (clock() - start))
    return {name: statistics.median(seen) for name, seen in times.items()}


if __name__ == "__main__":
    sys.exit(main())
