"""Which versions made a report, read from package metadata: nothing heavy is imported."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from rnnaudit import __version__


def versions() -> dict[str, str | None]:
    """Return the tool's name and version, and those of what it computes with (None: absent)."""
    return {
        "name": "rnnaudit",
        "version": __version__,
        **{package: _installed(package) for package in ("torch", "onnx", "onnxruntime")},
    }


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
