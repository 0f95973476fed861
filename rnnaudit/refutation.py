"""A refutation's witness as a file: inputs that anyone can replay."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np

from rnnaudit.errors import UsageError
from rnnaudit.examine import Examination


def save_witness(found: Examination, path: Path) -> str | None:
    """Save the witness that refutes most depths for the audit's ε; None where there is none.

    The stacks' outputs come first, then single recurrences'. The file is written whole or
    not at all.

    Raises:
        UsageError: The path cannot be written.
    """
    eps = found.settings.eps
    searches = [stack.refutation for stack in found.stacks]
    searches += [each.refutation for each in found.recurrences.values()]
    witnesses = [search.best(eps) for search in searches if search is not None]
    best = max(
        (witness for witness in witnesses if witness is not None),
        key=lambda witness: witness.refuted_below(eps),
        default=None,
    )
    if best is None:
        return None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".npz", delete=False) as file:
            np.savez_compressed(
                file,
                prefix=best.prefix.numpy(),
                inputs=best.inputs.numpy(),
                distances=best.distances.numpy(),
                norm=np.array(best.norm),
                eps=np.array(eps),
            )
        Path(file.name).replace(path)
    except OSError as error:
        raise UsageError(
            f"the witness must be writable, got {path}: {error.strerror}",
            help="choose another place",
            id="RA003",
        ) from error
    return os.fspath(path)
