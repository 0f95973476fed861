"""A stored weight in float64: the same numbers, checked."""

from __future__ import annotations

import torch
from torch import Tensor

from rnnaudit.errors import LoadError

_EXACT = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class UnreadableError(Exception):
    """Why one module cannot be read; it becomes a ``Skipped``, and the audit goes on."""


def exact(name: str, tensor: Tensor) -> Tensor:
    """Convert a stored weight to float64, which changes no value.

    Raises:
        LoadError: It is NaN or infinite somewhere, or claims more elements than are stored.
        UnreadableError: Its numbers are not plain floating point.
    """
    came = _kind(tensor)
    if came not in {str(dtype) for dtype in _EXACT}:
        raise UnreadableError(
            f"{name} must be dense float16, bfloat16, float32 or float64, got "
            + came.removeprefix("torch.")
        )
    if overclaims(tensor):
        raise LoadError(
            f"{name} claims {tensor.numel()} elements, more than are stored",
            help="save it again after .contiguous()",
        )
    converted = tensor.to(torch.float64).contiguous()
    if not converted.isfinite().all():
        index = tuple(int(i) for i in (~converted.isfinite()).nonzero()[0])
        raise LoadError(
            f"finite weights were expected, and {name} holds "
            f"{converted[index].item()} at {list(index)}",
            help="take an earlier checkpoint",
            id="RA104",
        )
    return converted


def overclaims(tensor: Tensor) -> bool:
    """Whether a tensor repeats stored elements, and would grow when it is copied."""
    if tensor.layout != torch.strided or tensor.is_meta:
        return False
    return tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes()


def _kind(tensor: Tensor) -> str:
    if tensor.is_meta:
        return "a tensor without numbers (device meta)"
    if tensor.is_quantized:
        return f"quantised {tensor.dtype}"
    return str(tensor.dtype if tensor.layout == torch.strided else tensor.layout)
