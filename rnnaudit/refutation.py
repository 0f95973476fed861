"""A refutation's witness as a file: inputs that anyone can replay, and what they show of what."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rnnaudit.certificates import Domain
from rnnaudit.errors import LoadError, UsageError
from rnnaudit.estimators import Recording, Refutation, Witness, is_one_hot
from rnnaudit.examine import ONE_HOT, ONE_HOT_DATA, Examination
from rnnaudit.model import Readout, Recurrence, Stack, fingerprint
from rnnaudit.results import Norm

SCHEMA = "rnnaudit.witness/1"

_LARGEST = 1 << 28  # bytes of a file's arrays, unpacked
_ARRAYS = {"prefix": 2, "inputs": 2, "distances": 1, "low": 1, "high": 1, "eps": 0}
_DEPTHS = "depths"  # of a recording only
_ROUNDING = "rounding"  # not in the files of version 0.1.0
_OPTIONAL = {_DEPTHS: 1, _ROUNDING: 0}
_RANGE = re.compile(r"(-?[0-9][0-9.e-]*) ≤ x ≤ (-?[0-9][0-9.e-]*)")
_TEXTS = ("schema", "where", "fingerprint", "domain", "norm")


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A witness, the ε it was found for, and what it was found in.

    Attributes:
        witness: The inputs: of a witness in the order in which the recurrence reads them, of a
            recording in the order of time.
        eps: The ε that decides what it refutes.
        where: A recurrence's label, or a stack's name where the stack's own output counts.
        fingerprint: Of the weights it was found in.
        domain: The inputs that were searched, in words.
        low: Smallest value [I] of each input there.
        high: Largest value [I] of each input there.
    """

    witness: Witness | Recording
    eps: float
    where: str
    fingerprint: str
    domain: str
    low: Tensor
    high: Tensor


def weights_fingerprint(part: Recurrence | Stack) -> str:
    """Hash all that the outputs of a recurrence, or of a stack with its readout, depend on."""
    if isinstance(part, Recurrence):
        return fingerprint(part)
    digest = hashlib.sha256()
    for recurrence in part.recurrences():
        digest.update(fingerprint(recurrence).encode())
    if isinstance(part.readout, Readout):
        for weight in (part.readout.A, part.readout.b):
            digest.update(weight.contiguous().numpy().astype("<f8").tobytes())
    return digest.hexdigest()


def save_witness(found: Examination, path: Path) -> str | None:
    """Save the witness that refutes most depths for the audit's ε; None where there is none.

    The stacks' outputs come first, then single recurrences'. The file is written whole or
    not at all.

    Raises:
        UsageError: The path cannot be written.
    """
    best = max(
        _witnesses(found),
        key=lambda stored: stored.witness.refuted_below(stored.eps),
        default=None,
    )
    if best is None:
        return None
    made = best.witness
    if isinstance(made, Recording):  # nothing is read by one run alone
        own = {"prefix": made.inputs[:0].numpy(), _DEPTHS: np.array(made.depths, dtype=np.float64)}
    else:
        own = {"prefix": made.prefix.numpy()}
    arrays = {
        **own,
        "inputs": best.witness.inputs.numpy(),
        "distances": best.witness.distances.numpy(),
        _ROUNDING: np.array(best.witness.rounding),
        "low": best.low.numpy(),
        "high": best.high.numpy(),
        "eps": np.array(best.eps),
        "norm": np.array(best.witness.norm),
        "schema": np.array(SCHEMA),
        "where": np.array(best.where),
        "fingerprint": np.array(best.fingerprint),
        "domain": np.array(best.domain),
    }
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".npz", delete=False) as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
        Path(file.name).replace(path)
    except OSError as error:
        raise UsageError(
            f"the witness must be writable, got {path}: {error.strerror}",
            help="choose another place",
            id="RA003",
        ) from error
    return os.fspath(path)


def _witnesses(found: Examination) -> Iterator[Stored]:
    """Yield the best witness of each stack's output, then of each recurrence's own."""
    eps = found.settings.eps
    parts: list[tuple[Refutation | None, Recurrence | Stack, str, Domain]] = [
        (each.refutation, each.stack, each.stack.name, domain)
        for each, domain in zip(found.stacks, found.domains, strict=True)
    ]
    parts += [
        (each.refutation, each.recurrence, label, each.domain)
        for label, each in found.recurrences.items()
    ]
    for search, part, where, domain in parts:
        witness = None if search is None else search.best(eps)
        if witness is not None:
            low, high = domain.box(witness.inputs.shape[1])
            yield Stored(witness, eps, where, weights_fingerprint(part), domain.name, low, high)


def load_witness(path: str | Path) -> Stored:
    """Read what ``save_witness`` wrote; nothing in the file is executed or trusted.

    Raises:
        LoadError: It is missing, damaged, or no witness.
    """
    path = Path(path)
    try:
        found = _arrays(path)
    except Exception as error:  # whatever an archive or the header of an array can hold
        reason = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
        raise _refuse(path, reason or type(error).__name__) from error
    prefix, inputs, distances = (found[name] for name in ("prefix", "inputs", "distances"))
    width, norm = prefix.shape[1], str(found["norm"])
    depths = found.get(_DEPTHS)
    whole = depths is not None
    steps = len(inputs) + 1 if depths is None else len(depths)
    checks = {
        f"its schema must be {SCHEMA}": str(found["schema"]) == SCHEMA,
        "its norm must be max or 2": norm in ("max", "2"),
        "it must hold a prefix and inputs": whole or min(len(prefix), len(inputs), width) > 0,
        "it must hold inputs and depths, and no prefix": not whole
        or (min(len(inputs), width, steps) > 0 and not len(prefix)),
        "its depths must be whole numbers that ascend": depths is None or _ascend(depths),
        "its inputs must be as wide as its prefix": inputs.shape[1] == width,
        "its box must be as wide as its prefix": found["low"].shape == found["high"].shape
        and found["low"].shape == (width,),
        "it must hold a distance for each depth": len(distances) == steps,
        "its ε must be positive": bool(found["eps"] > 0),
        "its rounding must not be negative": bool(found[_ROUNDING] >= 0),
    }
    for wanted, holds in checks.items():
        if not holds:
            raise _refuse(path, wanted)
    low, high = torch.from_numpy(found["low"]), torch.from_numpy(found["high"])
    x = torch.from_numpy(np.concatenate([prefix, inputs]))
    if not bool(((x >= low) & (x <= high)).all()):
        raise _refuse(path, "its inputs must lie in its box")
    if not _as_named(x, str(found["domain"])):
        raise _refuse(path, "its inputs must lie in the domain that it names")
    kind: Norm = "2" if norm == "2" else "max"
    gaps = torch.from_numpy(distances)
    may_add = float(found[_ROUNDING])
    witness: Witness | Recording
    if depths is None:
        witness = Witness(torch.from_numpy(prefix), torch.from_numpy(inputs), gaps, kind, may_add)
    else:
        tried = tuple(int(k) for k in depths)
        witness = Recording(torch.from_numpy(inputs), tried, gaps, kind, may_add)
    where, domain = str(found["where"]), str(found["domain"])
    return Stored(witness, float(found["eps"]), where, str(found["fingerprint"]), domain, low, high)


def _arrays(path: Path) -> Mapping[str, Any]:
    """Read every array of a witness, small, finite and of the kind that it must be."""
    with path.open("rb") as file:
        with zipfile.ZipFile(file) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > _LARGEST:
                raise ValueError("it is too large")
        file.seek(0)
        stored = np.load(file, allow_pickle=False)
        axes_of = _ARRAYS | {n: axes for n, axes in _OPTIONAL.items() if n in stored}
        found = {name: stored[name] for name in (*axes_of, *_TEXTS)}
    if no := [name for name, array in found.items() if not isinstance(array, np.ndarray)]:
        raise ValueError(f"{no[0]} must be an array")
    for name, axes in axes_of.items():
        array = found[name]
        if array.ndim != axes or array.dtype != np.float64 or not np.isfinite(array).all():
            raise ValueError(f"{name} must be {axes} axes of finite float64 numbers")
    for name in _TEXTS:
        if found[name].ndim or found[name].dtype.kind != "U" or found[name].dtype.itemsize > 4096:
            raise ValueError(f"{name} must be a short text")
    return {_ROUNDING: np.zeros(()), **found}


def _as_named(x: Tensor, domain: str) -> bool:
    """Whether inputs [T, I] lie in a domain; true of those that no name tells."""
    if domain == Domain().name:
        return bool((x.abs() <= 1).all())
    if domain in (ONE_HOT, ONE_HOT_DATA):
        return is_one_hot([x[None]])
    ends = _RANGE.fullmatch(domain)
    if ends is None:
        return True
    low, high = (float(end) for end in ends.groups())
    return bool(((x >= low) & (x <= high)).all())


def _ascend(depths: NDArray[np.float64]) -> bool:
    """Whether these are depths in the order in which they are kept, and none is out of reach."""
    whole = bool((depths == np.floor(depths)).all() and (depths >= 0).all())
    return whole and bool((depths < 1e9).all() and (np.diff(depths) > 0).all())


def _refuse(path: Path, reason: str) -> LoadError:
    return LoadError(
        f"a witness was wanted, {path} cannot be read as one: {reason}",
        help="rnnaudit inspect MODEL --witness FILE saves one",
        id="RA237",
    )
