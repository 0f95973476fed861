"""Reports of unchanged models are kept in the user's cache folder, whole or not at all.

An entry's name is a hash of everything that its report depends on: the bytes of the model and
of the data, the settings, the versions of what computes, and our own code. Whatever cannot be
read back exactly is as good as absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

from rnnaudit.results import Report

FOLDER = "RNNAUDIT_CACHE_DIR"
"""Environment variable that names another folder."""

MOST = 512
"""Reports that are kept; older ones go."""

LARGEST = 2**26
"""Bytes of an entry that is still read."""

_COMPUTES = ("torch", "numpy", "scipy", "onnx", "onnx-ir", "onnxruntime", "safetensors")


def key(model: Path, data: Path | None, settings: Mapping[str, object]) -> str | None:
    """Return the name under which a report is kept; None where a file cannot be hashed."""
    try:
        parts = {
            "model": [str(model), _file(model)],
            "data": None if data is None else [str(data), _contents(data)],
            "settings": dict(settings),
            "code": _code(),
            "versions": [_version(package) for package in _COMPUTES],
        }
    except (OSError, ValueError):
        return None
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def find(name: str, model: Path) -> Report | None:
    """Return the report that was kept, if it can be read and its other files are unchanged."""
    from rnnaudit.reports.reading import read

    try:
        path = _folder() / f"{name}.json"
        if path.stat().st_size > LARGEST:
            return None
        entry = json.loads(path.read_text("utf-8"))
        beside = entry["beside"]
        if any(_file(model.parent / file) != digest for file, digest in beside.items()):
            return None
        return read(json.dumps(entry["report"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def digests(model: Path, beside: Iterable[Path]) -> Mapping[str, str] | None:
    """Hash the other files that a model is made of, by name from its folder; None if one cannot."""
    try:
        return {os.path.relpath(file, model.parent): _file(file) for file in beside}
    except (OSError, ValueError):
        return None


def keep(name: str, report: Report, beside: Mapping[str, str]) -> None:
    """Keep a report that reads back exactly as it is; a folder that cannot be written is no error.

    Args:
        name: What `key` returned before the audit began.
        report: The audit.
        beside: The hashes of other files that the model is made of, as before and after the audit.
    """
    from rnnaudit.reports.json import JsonRenderer
    from rnnaudit.reports.reading import read

    render = JsonRenderer().render
    text = render(report)
    with contextlib.suppress(OSError, ValueError):
        if render(read(text)) != text:
            return
        _write(f"{name}.json", json.dumps({"beside": dict(beside), "report": json.loads(text)}))


def _write(name: str, text: str) -> None:
    """Put an entry in its place in one step, so that no reader ever sees a part of it."""
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as file:
        temporary = Path(file.name)
        file.write(text)
    try:
        temporary.replace(folder / name)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    entries = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for old in entries[:-MOST]:
        old.unlink(missing_ok=True)


def _folder() -> Path:
    named = os.environ.get(FOLDER)
    if named:
        return Path(named)
    from platformdirs import user_cache_path

    return user_cache_path("rnnaudit", appauthor=False)


def _file(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(path)  # a pipe would never end
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _contents(path: Path) -> list[Any]:
    """Hash a file, or every file of a folder by name."""
    if path.is_dir():
        return [[child.name, _file(child)] for child in sorted(path.iterdir()) if child.is_file()]
    return [_file(path)]


@cache
def _code() -> str:
    """Hash our own code, so that a report never outlives what made it."""
    digest = hashlib.sha256()
    root = Path(str(files("rnnaudit")))
    for path in sorted(p for kind in ("*.py", "*.json") for p in root.rglob(kind)):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
