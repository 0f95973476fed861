"""Why one node is left out: the rest of the model is still audited."""

from __future__ import annotations


class Refused(Exception):  # noqa: N818  (it ends in a Skipped record, not in an error)
    """A node that is not read; its message is the reason that the report shows."""


MALFORMED = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    StopIteration,
    RuntimeError,  # of PyTorch, where shapes do not go together; RecursionError is one
)
"""What reading operators that no checker would pass leads to."""
