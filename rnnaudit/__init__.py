"""Audit trained recurrent models: which are stable, how long they remember, what replaces them.

>>> import rnnaudit
>>> model = rnnaudit.load("model.pt")                 # doctest: +SKIP
>>> report = rnnaudit.audit(model, eps=1e-3)          # doctest: +SKIP
>>> report = rnnaudit.truncate(model, "out.onnx", eps=1e-3)  # doctest: +SKIP
>>> report = rnnaudit.certify(model, "proof.json", eps=1e-3)  # doctest: +SKIP
>>> rnnaudit.check("proof.json", model).proof_file.valid  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rnnaudit.api import audit, certify, check, load, replay, truncate, truncate_module, verify
    from rnnaudit.errors import (
        LoadError,
        RnnauditError,
        RnnauditWarning,
        UnsupportedModelError,
        UsageError,
    )
    from rnnaudit.results import Report

__version__ = "0.1.0"
__all__ = [
    "LoadError",
    "Report",
    "RnnauditError",
    "RnnauditWarning",
    "UnsupportedModelError",
    "UsageError",
    "__version__",
    "audit",
    "certify",
    "check",
    "load",
    "replay",
    "truncate",
    "truncate_module",
    "verify",
]

_HOMES = {"Report": "results"} | {
    name: "errors" for name in __all__ if name.endswith(("Error", "Warning"))
}


def __getattr__(name: str) -> object:
    """Import what is public on first use: torch alone takes seconds."""
    if name in __all__:
        from importlib import import_module

        return getattr(import_module(f"rnnaudit.{_HOMES.get(name, 'api')}"), name)
    raise AttributeError(f"module 'rnnaudit' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Name what is public."""
    return __all__
