"""ONNX Runtime in a child process: an abort, a hang or a leak ends the child, not the audit.

Arrays travel through ``.npz`` files in a temporary folder. The child works in that
folder, so a model that is given as bytes can pick up no file by accident, and external
data is read beside the model only.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rnnaudit.errors import LoadError

if TYPE_CHECKING:
    import onnx

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """What came of running a model: outputs by name for each feed, or why there are none."""

    outputs: list[dict[str, Array]] | None
    error: str | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Calls:
    """A sequence that a model is given call by call, its state carried from each to the next.

    Attributes:
        axes: Time axis of each input that is cut up; the others are given whole, every time.
        carry: The output that becomes an input at the next call; the feed holds the first.
        single: Whether a call takes one element along the axis, which is then gone, and not a
            block of one to eight steps.
        give: The outputs of the last call, those of all stacked along a new first axis, or
            joined along the axis whose size is that of the blocks.
    """

    axes: Mapping[str, int]
    carry: Mapping[str, str]
    single: bool
    give: Literal["last", "stack", "join"]


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a graph: a symbolic axis keeps its name, an unnamed one is ``?``."""

    name: str
    dtype: str
    shape: tuple[int | str, ...] | None


@dataclass(frozen=True, slots=True)
class Interface:
    """What a graph takes and gives; inputs with a stored default are left out.

    ``metadata`` is what the model's maker wrote beside the graph.
    """

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)


def run(
    model: Path | bytes,
    feeds: Sequence[Mapping[str, Array]],
    *,
    fetch: Sequence[str] | None = None,
    calls: Calls | None = None,
    timeout: float = 120.0,
    memory_mb: int | None = None,
    threads: int = 0,
    deterministic: bool = False,
) -> RunOutcome:
    """Run a model on each feed, in one session of one child process.

    Args:
        model: A file (external data is read beside it) or the serialized model.
        feeds: Arrays by graph-input name, one mapping per run.
        fetch: Names of values to return, inner ones included; the graph's outputs if None.
            Values inside the bodies of If, Loop and Scan cannot be fetched.
        calls: How each feed is given in several calls; in one without.
        timeout: Seconds for the whole call.
        memory_mb: Limit on the child's address space, where the system has one.
        threads: Threads per operator; 0 lets the runtime choose.
        deterministic: One thread and deterministic kernels, so that outputs repeat exactly.

    Returns:
        The outputs in the order of the feeds. A refusal by the runtime, a time-out and an
        abort of the process become ``error``; the call itself does not raise for them.
    """
    start = time.perf_counter()
    if fetch is not None:
        fetch = list(dict.fromkeys(fetch))
    fed = set.intersection(*(set(feed) for feed in feeds)) if feeds else set()
    wanted = None if fetch is None else [name for name in fetch if name not in fed]
    if not feeds or wanted == []:
        return RunOutcome([{n: np.asarray(f[n]) for n in fetch or ()} for f in feeds], None, 0.0)
    by_call = None if calls is None else asdict(calls)
    request = {
        "kind": "run",
        "fetch": wanted,
        "calls": by_call,
        **_settings(memory_mb, threads, deterministic),
    }
    with tempfile.TemporaryDirectory(prefix="rnnaudit-") as name:
        folder = Path(name)
        reply = _ask(folder, request, [model], feeds, fetch=wanted or (), timeout=timeout)
        outputs = None
        if reply["error"] is None:
            outputs = []
            for index, feed in enumerate(feeds):
                with np.load(folder / f"outputs{index}.npz") as stored:
                    found = {n: stored[f"a{i}"] for i, n in enumerate(reply["outputs"])}
                outputs.append(
                    found
                    if fetch is None
                    else {n: np.asarray(feed[n]) if n in fed else found[n] for n in fetch}
                )
    return RunOutcome(outputs, reply["error"], time.perf_counter() - start)


def latency(
    models: Sequence[Path | bytes],
    feeds: Sequence[Mapping[str, Array]],
    *,
    repeats: int = 25,
    budget: float = 10.0,
    timeout: float = 120.0,
    memory_mb: int | None = None,
    threads: int = 0,
) -> list[float | None]:
    """Return each model's median milliseconds per run; None where it did not run.

    The models take turns in one child process, so that a busy machine slows all alike.

    Args:
        models: Files or serialized models.
        feeds: One feed for each model.
        repeats: Most runs of each model, after one that is not counted.
        budget: Seconds after which no new round begins.
        timeout: Seconds for the whole call; past it every entry is None.
        memory_mb: Limit on the child's address space, where the system has one.
        threads: Threads per operator; 0 lets the runtime choose.
    """
    if len(models) != len(feeds):
        raise ValueError(
            f"latency needs one feed for each of {len(models)} models, not {len(feeds)}"
        )
    settings = _settings(memory_mb, threads, deterministic=False)
    request = {"kind": "latency", "repeats": repeats, "budget": budget, **settings}
    with tempfile.TemporaryDirectory(prefix="rnnaudit-") as name:
        reply = _ask(Path(name), request, models, feeds, timeout=timeout)
    return [None] * len(models) if reply["error"] is not None else list(reply["milliseconds"])


def describe(model: Path | bytes) -> Interface:
    """Read a graph's inputs, outputs and metadata without running it.

    Raises:
        LoadError: The file cannot be read or is not an ONNX model.
    """
    proto = _parse(model)
    graph = proto.graph
    stored = {tensor.name for tensor in graph.initializer}
    return Interface(
        tuple(_port(value) for value in graph.input if value.name not in stored),
        tuple(_port(value) for value in graph.output),
        {entry.key: entry.value for entry in proto.metadata_props},
    )


def sizes(model: Path | bytes) -> Mapping[str, tuple[int | None, ...]]:
    """Return the sizes of the main graph's values that hold whatever it is given, by name.

    An axis whose size only the run decides is None; a value of unknown rank is left out, and
    so is every value where shapes cannot be inferred.
    """
    import onnx
    import onnx.shape_inference

    try:
        proto = onnx.shape_inference.infer_shapes(_parse(model), data_prop=True)
    except (onnx.shape_inference.InferenceError, ValueError):  # too large, or no valid graph
        return {}
    graph = proto.graph
    return {
        port.name: tuple(d if isinstance(d, int) else None for d in port.shape)
        for port in map(_port, (*graph.input, *graph.value_info, *graph.output))
        if port.shape is not None
    }


def _settings(memory_mb: int | None, threads: int, deterministic: bool) -> dict[str, Any]:
    return {
        "memory_mb": memory_mb,
        "threads": 1 if deterministic else threads,
        "deterministic": deterministic,
    }


def _parse(model: Path | bytes) -> onnx.ModelProto:
    import onnx
    from google.protobuf.message import DecodeError

    try:
        data = model if isinstance(model, bytes) else model.read_bytes()
        proto: onnx.ModelProto = onnx.ModelProto.FromString(data)
    except (OSError, DecodeError) as error:
        name = "the given bytes" if isinstance(model, bytes) else str(model)
        reason = error.strerror if isinstance(error, OSError) else "it is damaged, or another kind"
        raise LoadError(
            f"an ONNX model was wanted, {name} cannot be read: {reason}",
            help="check the path, or export the model again",
        ) from error
    return proto


def _port(value: onnx.ValueInfoProto) -> Port:
    import onnx

    if not value.type.HasField("tensor_type"):
        return Port(value.name, value.type.WhichOneof("value") or "unknown", None)
    tensor = value.type.tensor_type
    dtype = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
    if not tensor.HasField("shape"):
        return Port(value.name, dtype, None)
    shape = (
        d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in tensor.shape.dim
    )
    return Port(value.name, dtype, tuple(shape))


def _extra_outputs(model: Path | bytes, names: Sequence[str]) -> bytes:
    """Serialize a model that holds nothing but new outputs: appended to a model, it merges."""
    import onnx

    present = {output.name for output in _parse(model).graph.output}
    outputs = [onnx.ValueInfoProto(name=name) for name in names if name not in present]
    if not outputs:
        return b""
    addition: bytes = onnx.ModelProto(graph=onnx.GraphProto(output=outputs)).SerializeToString()
    return addition


def _ask(
    folder: Path,
    request: dict[str, Any],
    models: Sequence[Path | bytes],
    feeds: Sequence[Mapping[str, Array]],
    *,
    fetch: Sequence[str] = (),
    timeout: float,
) -> dict[str, Any]:
    """Let the child answer; whatever goes wrong there comes back under ``error``."""
    entries = []
    for i, model in enumerate(models):
        inner, beside = (_extra_outputs(model, fetch) if fetch else b""), None
        if isinstance(model, bytes):
            path = folder / f"model{i}.onnx"
            path.write_bytes(model)
        else:
            path = model.absolute()
            beside = str(path.parent) if inner else None
        entries.append({"path": str(path), "folder": beside, "extra_outputs": inner.hex()})
    for i, feed in enumerate(feeds):
        np.savez(folder / f"feeds{i}.npz", **{f"a{j}": a for j, a in enumerate(feed.values())})  # type: ignore[arg-type]
    request = {**request, "models": entries, "feeds": [list(feed) for feed in feeds]}
    (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
    child = Path(__file__).with_name("runtime_child.py")
    try:
        process = subprocess.run(
            [sys.executable, "-P", str(child), str(folder)],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"ONNX Runtime did not finish within {timeout:g} s"}
    reply = folder / "reply.json"
    if process.returncode == 0 and reply.exists():
        answer: dict[str, Any] = json.loads(reply.read_text(encoding="utf-8"))
        return answer
    return {"error": _death(process.returncode, process.stderr)}


def _death(code: int, stderr: bytes) -> str:
    """Say how the child ended: the signal's name, or its exit code and last words."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"the ONNX Runtime process was ended by {name}"
    words = stderr.decode(errors="replace").strip().splitlines()
    return f"the ONNX Runtime process ended with exit code {code}" + (
        f": {words[-1]}" if words else ""
    )
