"""Claim: truncated forms of an LSTM beat its recurrence, and come near the arithmetic limit.

LSTM 64 → 256, T = 8000, batch 1, k = 32, in ONNX Runtime, cut inside the graph:

    chunk --keep-ops   at least 0.85 of the limit and 1.9 times as fast as the LSTM node
    chunk              at least 0.65 of the limit and 1.5 times as fast
    last               at least 30 times as fast

The limit of a chunk is one matrix product with as many multiplications, those of the
warm-up included. All run in turn within one process, and medians are compared: of processor
time on one thread, which other programs disturb least, of wall time on more. ``--table``
goes on over T, H and k.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper

from rnnaudit import load
from rnnaudit.export import build, choose, serialize, truncate_graph
from rnnaudit.export.costs import Costs
from rnnaudit.model import InitialState, Layer, LSTMCell, Model, Recurrence, Stack
from rnnaudit.truncation import Form, Shape

INPUTS, T, H, K = 64, 8000, 256, 32
FASTER = {"chunk --keep-ops": 1.9, "chunk": 1.5, "last": 30.0}
OF_LIMIT = {"chunk --keep-ops": 0.85, "chunk": 0.65}
TABLE = ((256, 1024, 8000), (32, 128, 256), (8, 32, 128))
SLOWEST = 2e6
"""Microseconds that a form may cost to be timed in the table."""


def main() -> int:
    """Print ours, the original and the limit side by side, and return 1 where a claim fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="go on over T, H and k")
    arguments = parser.parse_args()
    threads = arguments.threads
    row = measure(T, H, K, repeats=arguments.repeats, threads=threads)
    failed = [
        f"{form}: {row[form][name]:.2f} {what}, wanted {least}"
        for name, what, claims in (
            ("times_faster", "times as fast", FASTER),
            ("of_limit", "of the limit", OF_LIMIT),
        )
        for form, least in claims.items()
        if row[form][name] < least
    ]
    rows = []
    if arguments.table:
        cases = itertools.product(*TABLE)
        few = max(3, arguments.repeats // 3)
        rows = [measure(*case, repeats=few, threads=threads) for case in cases]
    if arguments.json:
        versions = {"onnxruntime": onnxruntime.__version__, "threads": threads}
        print(
            json.dumps({"passed": not failed, "failed": failed, **versions, "rows": [row, *rows]})
        )
        return 1 if failed else 0
    print(f"LSTM {INPUTS} → H, batch 1, float32, {threads} thread(s), medians in ms")
    print("    T    H    k   original " + "".join(f"{name:>34}" for name in NAMES))
    for each in [row, *rows]:
        print(line(each))
    print("ms (C), × as fast as the original, share of the limit's speed")
    print("claims: " + ("hold" if not failed else "FAIL: " + "; ".join(failed)))
    return 1 if failed else 0


NAMES = ("window", "chunk", "chunk --keep-ops", "last", "last --keep-ops")


def line(row: dict[str, Any]) -> str:
    """Write one row of the table."""
    cells = []
    for name in NAMES:
        form = row[name]
        if form is None:
            cells.append("–")
            continue
        block = f" ({form['block']})" if form["block"] > 1 else ""
        limit = f"  {form['of_limit']:5.2f}" if form["of_limit"] else ""
        cells.append(f"{form['ms']:.2f}{block}  {form['times_faster']:6.2f}×{limit}")
    numbers = f"{row['T']:5d} {row['H']:4d} {row['k']:4d} {row['original_ms']:10.2f} "
    return numbers + "".join(f"{cell:>34}" for cell in cells)


def measure(steps: int, hidden: int, k: int, *, repeats: int, threads: int) -> dict[str, Any]:
    """Time every form, the original and the limits in turn; check first what they compute."""
    stack = lstm(hidden)
    every, last_node, final = models(stack)
    (r,) = stack.recurrences()
    label = {m: next(m.recurrences()).label for m in (every, final)}
    x = np.random.default_rng(0).standard_normal((steps, 1, INPUTS)).astype(np.float32)
    runners = {
        "original": session(serialize(build(stack)), threads),
        "final": session(last_node, threads),
    }
    feeds = dict.fromkeys(runners, x)
    forms: dict[str, Form | None] = dict.fromkeys(NAMES)
    for name in NAMES:
        kind, keep = name.split(" ")[0], name.endswith("ops")
        model = final if kind == "last" else every
        if kind == "window" and Costs(r.cell, k).window(steps) > SLOWEST:
            continue
        depths = {label[model]: k}
        chosen = choose(model, depths, Shape(kind, keep, steps))  # type: ignore[arg-type]
        forms[name] = chosen[label[model]]
        runners[name] = session(serialize(truncate_graph(model, depths, chosen)), threads)
        feeds[name] = x
        agree(runners["final" if kind == "last" else "original"], runners[name], x[:k])
        if kind == "chunk":
            rows = round(steps * (1 + (k - 1) / forms[name].block))
            runners[f"limit of {name}"] = product(rows, INPUTS + hidden, 4 * hidden, threads)
            feeds[f"limit of {name}"] = np.ones((rows, INPUTS + hidden), np.float32)
    ms = medians_ms(runners, feeds, repeats=repeats, threads=threads)
    row: dict[str, Any] = {"T": steps, "H": hidden, "k": k, "original_ms": ms["original"]}
    for name, form in forms.items():
        limit = ms.get(f"limit of {name}")
        row[name] = form and {
            "ms": ms[name],
            "block": form.block,
            "times_faster": ms["final" if form.name == "last" else "original"] / ms[name],
            "limit_ms": limit,
            "of_limit": limit and limit / ms[name],
        }
    return row


def lstm(hidden: int) -> Stack:
    """Draw an LSTM that forgets fast, so that every form agrees with the original."""
    rng = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float) -> torch.Tensor:
        return (scale * torch.randn(*shape, generator=rng)).double()

    cell = LSTMCell(
        draw(4 * hidden, INPUTS, scale=0.5 * INPUTS**-0.5),
        draw(4 * hidden, hidden, scale=0.25 * hidden**-0.5),
        draw(4 * hidden, scale=0.1),
    )
    zero = InitialState(torch.zeros(2 * hidden, dtype=torch.float64))
    return Stack("rnn", (Layer((Recurrence("rnn", 0, cell, zero),)),))


def models(stack: Stack) -> tuple[Model, bytes, Model]:
    """Return the stack as a model of every output, and a graph that gives the last, as read."""
    every = Model(Path("lstm.pt"), "weights", "0" * 64, (stack,), whole=True)
    stored = build(stack).graph.initializers
    weights = [
        numpy_helper.from_array(stored[f"rnn/layer_0/{n}"].const_value.numpy(), n) for n in "WRB"
    ]
    hidden = stack.output_size
    graph = helper.make_graph(
        [
            helper.make_node("LSTM", ["x", *"WRB"], ["", "h"], name="rnn", hidden_size=hidden),
            helper.make_node("Squeeze", ["h", "zero"], ["y"]),
        ],
        "final",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["time", "batch", INPUTS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", hidden])],
        [*weights, numpy_helper.from_array(np.array([0]), "zero")],
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "final.onnx"
        path.write_bytes(model_of(graph))
        return every, path.read_bytes(), load(path)


def model_of(graph: onnx.GraphProto) -> bytes:
    """Serialize a graph in opset 17."""
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def product(rows: int, inner: int, columns: int, threads: int) -> onnxruntime.InferenceSession:
    """Return one matrix product [rows, inner] × [inner, columns] with stored weights."""
    weights = np.ones((inner, columns), np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, inner])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [rows, columns])],
        [numpy_helper.from_array(weights, "w")],
    )
    return session(model_of(graph), threads)


def session(model: bytes, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def agree(reference: onnxruntime.InferenceSession, form: onnxruntime.InferenceSession, x: Any):
    """Refuse to time what does not compute the same over k steps, where every form is exact."""
    (wanted,), (got,) = (s.run(["y"], {"x": x}) for s in (reference, form))
    error = float(np.abs(wanted - got).max())
    if not error <= 1e-5:
        raise SystemExit(f"a form errs by {error:g}")


def medians_ms(
    sessions: dict[str, onnxruntime.InferenceSession],
    feeds: dict[str, Any],
    *,
    repeats: int,
    threads: int,
) -> dict[str, float]:
    """Run the sessions in turn, ``repeats`` rounds after one to warm up."""
    clock = time.process_time if threads == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for round_ in range(repeats + 1):
        for name, each in sessions.items():
            start = clock()
            each.run(None, {"x": feeds[name]})
            if round_:
                times[name].append(1e3 * (clock() - start))
    return {name: statistics.median(seen) for name, seen in times.items()}


if __name__ == "__main__":
    sys.exit(main())
