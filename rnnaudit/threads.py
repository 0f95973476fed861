"""How many threads the matrices of a model are worth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

SMALL = 256
"""States up to this size are stepped fastest by one thread: waking a second costs more."""


@contextmanager
def few_threads(size: int) -> Iterator[None]:
    """Keep matrices of a state of this size on one thread where they are small."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1 if size <= SMALL else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
