"""The child process of ``runtime``: the only code that loads ONNX Runtime.

Run as a script with one argument, a folder that holds ``request.json`` and the feeds
as ``.npz`` files; it writes ``reply.json`` and the outputs beside them. It imports
NumPy and ONNX Runtime and nothing of this package, so that it starts in a third of a
second and an abort in the runtime ends this process only.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def _limit_memory(megabytes: int | None) -> None:
    if megabytes is None:
        return
    try:
        import resource
    except ImportError:  # no such limit on Windows
        return
    limit = megabytes * 2**20
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    except (OSError, ValueError):  # macOS refuses limits on the address space
        return


def _session(model: dict[str, Any], settings: dict[str, Any]) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = settings["threads"]
    options.inter_op_num_threads = settings["threads"]
    options.use_deterministic_compute = settings["deterministic"]
    if model["folder"] is not None:
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", model["folder"]
        )
    source = model["path"]
    if model["extra_outputs"]:
        extra = bytes.fromhex(model["extra_outputs"])
        source = Path(model["path"]).read_bytes() + extra  # protobuf merges what is appended
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def _feeds(folder: Path, index: int, names: list[str]) -> dict[str, Any]:
    with np.load(folder / f"feeds{index}.npz") as stored:
        return {name: stored[f"a{i}"] for i, name in enumerate(names)}


def _run(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    session = _session(request["models"][0], request)
    names = request["fetch"] or [o.name for o in session.get_outputs()]
    calls = request["calls"]
    pieces = []
    for index, feed_names in enumerate(request["feeds"]):
        feed = _feeds(folder, index, feed_names)
        if calls is None:
            _save(folder, index, names, session.run(names, feed))
        else:
            pieces.append(_in_calls(session, names, feed, calls))
    for index, (values, _) in enumerate(pieces):
        joined = [
            _joined([v[i] for v in values], calls["give"], _time_axis(pieces, i))
            for i in range(len(names))
        ]
        _save(folder, index, names, joined)
    return {"outputs": names}


def _save(folder: Path, index: int, names: list[str], values: list[Any]) -> None:
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, np.ndarray):
            raise TypeError(f"output {name!r} is a {type(value).__name__}, not a tensor")
    # Strings come as objects, which a .npz without pickles cannot hold.
    arrays = {
        f"a{i}": value.astype(np.str_) if value.dtype == object else value
        for i, value in enumerate(values)
    }
    np.savez(folder / f"outputs{index}.npz", **arrays)


BLOCKS = (1, 3, 8)
"""Steps per call, in turn."""


def _in_calls(
    session: Any, names: list[str], feed: dict[str, Any], calls: dict[str, Any]
) -> tuple[list[Any], list[int]]:
    """Run a sequence call by call; return the outputs and the steps of each."""
    axes, carry = calls["axes"], calls["carry"]
    steps = min(feed[name].shape[axis] for name, axis in axes.items())
    state = {name: feed[name] for name in carry}
    wanted = list(dict.fromkeys([*names, *carry.values()]))
    found: list[Any] = []
    sizes: list[int] = []
    first = 0
    while first < steps:
        size = 1 if calls["single"] else min(BLOCKS[len(sizes) % len(BLOCKS)], steps - first)
        part = {
            name: np.take(
                feed[name], first if calls["single"] else range(first, first + size), axis=axis
            )
            for name, axis in axes.items()
        }
        given = dict(zip(wanted, session.run(wanted, {**feed, **state, **part}), strict=True))
        state = {name: given[output] for name, output in carry.items()}
        found.append([given[name] for name in names])
        sizes.append(size)
        first += size
    return found, sizes


def _time_axis(pieces: list[tuple[list[Any], list[int]]], output: int) -> int | None:
    """Return the axis of an output whose size is that of the block at every call."""
    shapes = [
        (value[output].shape, size)
        for values, sizes in pieces
        for value, size in zip(values, sizes, strict=True)
    ]
    rank = min((len(shape) for shape, _ in shapes), default=0)
    fitting = (axis for axis in range(rank) if all(s[axis] == size for s, size in shapes))
    return next(fitting, None)


def _joined(values: list[Any], give: str, axis: int | None) -> Any:
    """Put an output of several calls together; one that has no such axis is the last call's."""
    if give == "stack" and len({value.shape for value in values}) == 1:
        return np.stack(values)
    if give == "join" and axis is not None:
        return np.concatenate(values, axis=axis)
    return values[-1]


def _latency(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    prepared: list[tuple[Any, dict[str, Any]] | None] = []
    for model, (index, feed_names) in zip(
        request["models"], enumerate(request["feeds"]), strict=True
    ):
        try:
            session, feeds = _session(model, request), _feeds(folder, index, feed_names)
            session.run(None, feeds)  # the first run allocates
        except Exception:
            prepared.append(None)
        else:
            prepared.append((session, feeds))
    times: list[list[float]] = [[] for _ in prepared]
    start = time.perf_counter()
    for round_ in range(request["repeats"]):
        if round_ and time.perf_counter() - start > request["budget"]:
            break
        for taken, pair in zip(times, prepared, strict=True):
            if pair is not None:
                before = time.perf_counter()
                pair[0].run(None, pair[1])
                taken.append(time.perf_counter() - before)
    return {"milliseconds": [float(np.median(t)) * 1e3 if t else None for t in times]}


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def main(folder: Path) -> None:
    """Answer the request that lies in ``folder``."""
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    _limit_memory(request["memory_mb"])
    work = {"run": _run, "latency": _latency}[request["kind"]]
    try:
        reply = {"error": None, **work(folder, request)}
    except Exception as error:
        reply = {"error": _line(error)}
    (folder / "reply.json").write_text(json.dumps(reply), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
