"""Claim: LSTM Jacobians of 8 states at once are ≥ 5 times faster than vmap(jacrev).

The peer differentiates a plain LSTM step with ``torch.func``; the limit is the time to
write as many bytes. All three run in turn within one process, and medians are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from rnnaudit.cells import jacobian
from rnnaudit.model import LSTMCell

BATCH, INPUTS, WIDTHS, CLAIM = 8, 32, (64, 256, 512), 5.0


def main() -> int:
    """Print one line per width, and return 1 where the claim fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = [compare(width, arguments.repeats) for width in WIDTHS]
    passed = all(row["times_faster"] >= CLAIM for row in rows)
    if arguments.json:
        settings = {"batch": BATCH, "threads": arguments.threads, "torch": torch.__version__}
        print(json.dumps({"claim": CLAIM, "passed": passed, **settings, "rows": rows}, indent=2))
    else:
        print(f"LSTM, {BATCH} states, float64, {arguments.threads} thread(s), medians in ms")
        print("   H      ours   vmap(jacrev)   times faster   limit (write)   ours / limit")
        for row in rows:
            print(
                f"{row['hidden']:4d} {row['ours_ms']:9.3f} {row['peer_ms']:14.3f}"
                f" {row['times_faster']:14.1f} {row['limit_ms']:15.3f} {row['over_limit']:14.1f}"
            )
        print(f"claim (at least {CLAIM:g} times faster): {'holds' if passed else 'FAILS'}")
    return 0 if passed else 1


def compare(hidden: int, repeats: int) -> dict[str, float]:
    """Time ours, the peer and the limit in turn; check first that the Jacobians agree."""
    rng = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    cell = LSTMCell(
        draw(4 * hidden, INPUTS) / INPUTS**0.5,
        draw(4 * hidden, hidden) / hidden**0.5,
        draw(4 * hidden),
    )
    s, x = draw(BATCH, 2 * hidden), draw(BATCH, INPUTS)
    peer = torch.func.vmap(torch.func.jacrev(lambda s, x: plain_step(cell, s, x)))
    torch.testing.assert_close(jacobian(cell, s, x), peer(s, x), rtol=1e-12, atol=1e-12)
    ours_ms, peer_ms, limit_ms = medians_ms(
        repeats,
        lambda: jacobian(cell, s, x),
        lambda: peer(s, x),
        lambda: torch.empty(BATCH, 2 * hidden, 2 * hidden, dtype=torch.float64).fill_(1.0),
    )
    return {
        "hidden": hidden,
        "ours_ms": ours_ms,
        "peer_ms": peer_ms,
        "times_faster": peer_ms / ours_ms,
        "limit_ms": limit_ms,
        "over_limit": ours_ms / limit_ms,
    }


def plain_step(cell: LSTMCell, s: Tensor, x: Tensor) -> Tensor:
    """Take one LSTM step as one writes it for autodiff; s is (h, c) side by side."""
    h, c = s.chunk(2, dim=-1)
    i, f, g, o = (cell.W @ x + cell.U @ h + cell.b).chunk(4, dim=-1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.cat([torch.sigmoid(o) * torch.tanh(c), c], dim=-1)


def medians_ms(repeats: int, *functions: Callable[[], object]) -> list[float]:
    """Run the functions in turn, ``repeats`` rounds after one to warm up."""
    times: list[list[float]] = [[] for _ in functions]
    for round_ in range(repeats + 1):
        for function, seen in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            if round_:
                seen.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(seen) for seen in times]


if __name__ == "__main__":
    sys.exit(main())
