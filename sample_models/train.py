"""Three models of Bach's chorales, and one latch built by formula, to try `rnnaudit` on.

Each trained model reads the notes sounding now (88 keys, 0 or 1) and gives the logits of the
notes at the next step. Run it as

    python sample_models/train.py JSB_Chorales.mat --out sample_models

Everything is seeded; the same machine and library versions give the same files.
"""

import argparse
import hashlib
import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from scipy.io import loadmat
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, dropout

KEYS = 88
NORM_LIMIT = 0.95
SEQUENCE_LENGTH = 236
DEPTHS = (8, 16, 32, 64, 128)
OPSET = 17


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one model is trained; the epoch with the smallest validation loss is kept."""

    kind: str
    hidden: int
    epochs: int
    learning_rate: float
    weight_decay: float
    crop: int = 64
    batch: int = 16
    drop: float = 0.3
    seed: int = 0


RECIPES = {
    "bach_rnn.pt": Recipe("rnn", 96, epochs=100, learning_rate=3e-3, weight_decay=0.03),
    "bach_gru.pt": Recipe("gru", 96, epochs=70, learning_rate=1e-2, weight_decay=1.0),
    "bach_lstm.onnx": Recipe("lstm", 96, epochs=160, learning_rate=1e-2, weight_decay=0.3),
}


class NextNotes(nn.Module):
    """A recurrence named after its kind (`rnn`, `gru`, `lstm`), then a linear readout."""

    def __init__(self, kind: str, hidden: int) -> None:
        super().__init__()
        self.kind = kind
        self.add_module(kind, {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}[kind](KEYS, hidden))
        self.readout = nn.Linear(hidden, KEYS)

    def states(self, x: Tensor) -> Tensor:
        """Return h at every step, `[time, batch, hidden]`, from the zero state."""
        return self.get_submodule(self.kind)(x)[0]

    def forward(self, x: Tensor) -> Tensor:
        """Map notes `[time, batch, 88]` to the logits of the next notes."""
        return self.readout(self.states(x))


def read_chorales(path: Path) -> dict[str, list[Tensor]]:
    """Return the `train`, `valid` and `test` chorales, each `[time, 88]` of 0 and 1."""
    cells = loadmat(path)
    return {
        split: [torch.tensor(roll, dtype=torch.float32) for roll in cells[f"{split}data"].ravel()]
        for split in ("train", "valid", "test")
    }


def batches(chorales: list[Tensor], recipe: Recipe, rng: torch.Generator) -> Iterator[Tensor]:
    """Yield `[crop + 1, batch, 88]`: the chorales joined in a new order, cut at a new offset."""
    order = torch.randperm(len(chorales), generator=rng).tolist()
    stream = torch.cat([chorales[i] for i in order])
    stream = stream[int(torch.randint(recipe.crop, (), generator=rng)) :]
    crops = stream.unfold(0, recipe.crop + 1, recipe.crop).permute(0, 2, 1)
    for chosen in torch.randperm(len(crops), generator=rng).split(recipe.batch):
        yield crops[chosen].transpose(0, 1)


@torch.no_grad()
def project(W: Tensor) -> None:
    """Clip the singular values of W in place so that ‖W‖₂ ≤ 0.95 (Miller & Hardt 2019).

    Storing in float32 moves W by at most 2⁻²⁴‖W‖_F < 6e-7 in norm for up to 112 units; the
    clip at 0.95 − 1e-6 leaves room for it.
    """
    U, S, Vh = torch.linalg.svd(W.double(), full_matrices=False)
    W.copy_((U * S.clamp(max=NORM_LIMIT - 1e-6)) @ Vh)


@torch.no_grad()
def nats_per_step(model: NextNotes, chorales: list[Tensor]) -> float:
    """Mean negative log likelihood of steps 2, 3, ... of each chorale, summed over the keys."""
    total = sum(
        binary_cross_entropy_with_logits(model(x[:-1, None])[:, 0], x[1:], reduction="sum").item()
        for x in chorales
    )
    return total / sum(len(x) - 1 for x in chorales)


def train(recipe: Recipe, data: dict[str, list[Tensor]]) -> NextNotes:
    """Train by AdamW with a cosine schedule; every crop starts from the zero state."""
    torch.manual_seed(recipe.seed)
    rng = torch.Generator().manual_seed(recipe.seed)
    model = NextNotes(recipe.kind, recipe.hidden)
    if recipe.kind == "gru":  # h' = (1 − z)n + zh: begin with a small z, that is, forgetful
        with torch.no_grad():
            model.gru.bias_ih_l0[recipe.hidden : 2 * recipe.hidden] -= 2
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.epochs)
    best, kept = float("inf"), {}
    for epoch in range(recipe.epochs):
        for notes in batches(data["train"], recipe, rng):
            logits = model.readout(dropout(model.states(notes[:-1]), recipe.drop))
            loss = binary_cross_entropy_with_logits(logits, notes[1:]) * KEYS
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            if recipe.kind == "rnn":
                project(model.rnn.weight_hh_l0)
        schedule.step()
        valid = nats_per_step(model, data["valid"])
        if valid < best:
            best, kept = valid, {name: p.clone() for name, p in model.state_dict().items()}
        if epoch % 20 == 19:
            print(f"  epoch {epoch + 1:3}: valid {valid:.3f}, best {best:.3f}", flush=True)
    model.load_state_dict(kept)
    return model


def joined(chorales: list[Tensor], length: int = SEQUENCE_LENGTH) -> Tensor:
    """Join the chorales in order, cut into `[sequence, length, 88]`, and drop the remainder."""
    stream = torch.cat(chorales)
    count = len(stream) // length
    return stream[: count * length].view(count, length, KEYS)


@torch.no_grad()
def truncation_errors(model: NextNotes, x: Tensor) -> dict[int, float]:
    """Largest change of any logit, by depth, when only the last k steps are kept, in float64."""
    model, x = deepcopy(model).double(), x.double()
    whole = model(x.transpose(0, 1)).transpose(0, 1)
    errors = {}
    for k in DEPTHS:
        windows = x.unfold(1, k, 1).permute(3, 0, 1, 2)  # [k, sequence, position, 88]
        last = model.states(windows.flatten(1, 2))[-1].unflatten(0, windows.shape[1:3])
        errors[k] = (model.readout(last) - whole[:, k - 1 :]).abs().max().item()
    return errors


def tensor(name: str, value: np.ndarray) -> onnx.TensorProto:
    return numpy_helper.from_array(np.ascontiguousarray(value), name)


def finish(graph: onnx.GraphProto, path: Path) -> None:
    """Check the graph and write it as an ONNX file."""
    model = helper.make_model(
        graph,
        producer_name="rnnaudit sample_models",
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=8,
    )
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)


def write_lstm(model: NextNotes, path: Path) -> None:
    """Write `LSTM → Squeeze → MatMul → Add`; torch orders the gates ifgo, ONNX iofc."""

    def gates(value: Tensor) -> np.ndarray:
        i, f, g, o = value.detach().chunk(4)
        return torch.cat([i, o, f, g]).numpy()

    lstm = model.lstm
    hidden = lstm.hidden_size
    bias = np.concatenate([gates(lstm.bias_ih_l0), gates(lstm.bias_hh_l0)])
    graph = helper.make_graph(
        [
            helper.make_node("LSTM", ["x", "W", "R", "B"], ["Y"], "lstm", hidden_size=hidden),
            helper.make_node("Squeeze", ["Y", "directions"], ["h"], "squeeze"),
            helper.make_node("MatMul", ["h", "readout_weight"], ["product"], "matmul"),
            helper.make_node("Add", ["product", "readout_bias"], ["logits"], "add"),
        ],
        "bach_lstm",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["time", "batch", KEYS])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["time", "batch", KEYS])],
        [
            tensor("W", gates(lstm.weight_ih_l0)[None]),
            tensor("R", gates(lstm.weight_hh_l0)[None]),
            tensor("B", bias[None]),
            tensor("directions", np.array([1], np.int64)),
            tensor("readout_weight", model.readout.weight.detach().numpy().T),
            tensor("readout_bias", model.readout.bias.detach().numpy()),
        ],
    )
    finish(graph, path)


def write_latch(path: Path) -> None:
    """Write two tanh units, one that remembers for ever and one that forgets.

        a' = tanh(2a + 4x),   b' = tanh(b/2 + x),   y = a + b/2

    With x = 0, a' = tanh(2a) has the stable fixed points ±0.9575 and the unstable one 0, where
    the model starts. A step of x = ±1 sets a to its sign, from any state, and it stays there.
    """
    graph = helper.make_graph(
        [
            helper.make_node("RNN", ["x", "W", "R"], ["Y"], "latch", hidden_size=2),
            helper.make_node("Squeeze", ["Y", "directions"], ["h"], "squeeze"),
            helper.make_node("MatMul", ["h", "readout"], ["y"], "matmul"),
        ],
        "latch",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["time", "batch", 1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["time", "batch", 1])],
        [
            tensor("W", np.array([[[4.0], [1.0]]], np.float32)),
            tensor("R", np.array([[[2.0, 0.0], [0.0, 0.5]]], np.float32)),
            tensor("directions", np.array([1], np.int64)),
            tensor("readout", np.array([[1.0], [0.5]], np.float32)),
        ],
    )
    finish(graph, path)


def run_onnx(path: Path, x: np.ndarray) -> np.ndarray:
    """Return the model's only output for `x`, by ONNX Runtime."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def latch_gap(path: Path) -> float:
    """Smallest distance of the outputs over 2,000 zero inputs after a pulse of +1 or −1."""
    x = np.zeros((2001, 2, 1), np.float32)
    x[0, :, 0] = 1, -1
    y = run_onnx(path, x)[1:, :, 0]
    return float(np.abs(y[:, 0] - y[:, 1]).min())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train and build the sample models.")
    parser.add_argument("data", type=Path, help="JSB_Chorales.mat, as distributed with TCN")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)

    data = read_chorales(arguments.data)
    test = joined(data["test"])
    np.savez_compressed(out / "chorales_test.npz", x=test.numpy().astype(np.uint8))
    results = {}
    for name, recipe in RECIPES.items():
        print(f"{name}: {recipe}", flush=True)
        model = train(recipe, data)
        if name.endswith(".pt"):
            torch.save(model.state_dict(), out / name)
        else:
            write_lstm(model, out / name)
            x = test.transpose(0, 1).contiguous()
            distance = np.abs(run_onnx(out / name, x.numpy()) - model(x).detach().numpy()).max()
            assert distance < 1e-5, f"ONNX Runtime and torch differ by {distance}"
        W = model.get_parameter(f"{recipe.kind}.weight_hh_l0").detach().double()
        results[name] = {
            "recipe": asdict(recipe),
            "valid_nll": nats_per_step(model, data["valid"]),
            "test_nll": nats_per_step(model, data["test"]),
            "recurrent_norm": torch.linalg.matrix_norm(W, ord=2).item(),
            "readout_norm": torch.linalg.matrix_norm(
                model.readout.weight.detach().double(), ord=2
            ).item(),
            "error_by_depth": truncation_errors(model, test),
        }
        print(f"  {json.dumps(results[name])}", flush=True)

    write_latch(out / "latch.onnx")
    results["latch.onnx"] = {"smallest_gap": latch_gap(out / "latch.onnx")}
    assert results["latch.onnx"]["smallest_gap"] > 1
    for name in [*results, "chorales_test.npz"]:
        content = (out / name).read_bytes()
        results.setdefault(name, {})["bytes"] = len(content)
        results[name]["sha256"] = hashlib.sha256(content).hexdigest()
        print(f"{name}: {len(content)} bytes, sha256 {results[name]['sha256']}")
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
