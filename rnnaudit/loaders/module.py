"""A live ``nn.Module``: the recurrent modules inside it, with the weights they compute with."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.ao.nn.quantized.dynamic.modules import rnn as dynamic

from rnnaudit.errors import LoadError
from rnnaudit.loaders.grouping import slot_of
from rnnaudit.loaders.interface import brief
from rnnaudit.loaders.named import Source, read_model
from rnnaudit.model import RELU, TANH, Activation, Model
from rnnaudit.results import LIVE

_KNOWN = (
    nn.RNN,
    nn.GRU,
    nn.LSTM,
    nn.RNNCell,
    nn.GRUCell,
    nn.LSTMCell,
    dynamic.GRU,
    dynamic.LSTM,
    dynamic.RNNCell,
    dynamic.GRUCell,
    dynamic.LSTMCell,
)


def read_module(module: nn.Module, path: Path | None = None) -> Model:
    """Read every PyTorch recurrence inside a module, in eval mode; the module is not changed.

    Parametrised weights are those that the module itself computes, quantised ones are
    dequantised. A subclass with a ``forward`` of its own is left out by name.

    Args:
        module: The module.
        path: What to call it; its class without.

    Raises:
        LoadError: A weight is NaN or infinite.
        UnsupportedModelError: It holds no recurrence that can be read.
    """
    with evaluating(module), torch.no_grad():
        tensors = _tensors(module)
    inside = {f"{name}." if name else "": part for name, part in module.named_modules()}
    holders = {slot[0] for name in tensors if (slot := slot_of(name))}
    source = Source(
        path or Path(type(module).__name__),
        LIVE,
        _sha256(tensors),
        activations=_activations(inside),
        unreadable={
            prefix: f"its class {_class(inside[prefix])} computes in its own way"
            for prefix in holders & inside.keys()
            if not _is_pytorchs(inside[prefix])
        },
        modules=inside,
    )
    return read_model(tensors, source)


def made(spec: str, weights: Path | None = None) -> nn.Module:
    """Call ``package.module:callable`` for a module, and load the weights of a file into it.

    This runs the code of that package. The working folder is searched first.

    Raises:
        LoadError: There is no such callable, it fails, it returns something else, or the
            weights do not fit.
    """
    from rnnaudit.loaders.state_dict import read_checkpoint

    name, colon, attribute = spec.partition(":")
    if not (name and colon and attribute):
        raise LoadError(
            f"a factory must be package.module:callable, got {spec!r}",
            help="e.g. --factory train.model:build",
        )
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        module = getattr(importlib.import_module(name), attribute)()
    except Exception as error:
        raise LoadError(
            f"the factory {spec} raised {type(error).__name__}: {brief(error)}",
            help="it is called without arguments",
        ) from error
    finally:
        if here in sys.path:  # the factory is free to change it
            sys.path.remove(here)
    if not isinstance(module, nn.Module):
        raise LoadError(
            f"the factory {spec} must return an nn.Module, got {type(module).__name__}",
            help="name a function that builds the model, or its class",
        )
    if weights is not None:
        try:
            module.load_state_dict(cast("Mapping[str, Tensor]", read_checkpoint(weights)))
        except (RuntimeError, TypeError, AttributeError) as error:
            raise LoadError(
                f"the weights in {weights} do not fit the module that {spec} makes: {brief(error)}",
                help="give the state_dict of that very module, or let the factory load it",
            ) from None
    return module


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put every part in eval mode for a while: a spectral norm trains whenever it is read."""
    was = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in was.items():
            part.training = training


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, in the order in which modules were made."""
    found: dict[str, Tensor] = {}
    for name, part in module.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(part, dynamic.RNNBase | dynamic.RNNCellBase):
            packed: Any = part
            for leaf, value in {**packed.get_weight(), **packed.get_bias()}.items():
                found[prefix + leaf] = value.detach()
            continue
        computed = getattr(part, "parametrizations", None) or {}
        for leaf in computed:
            found[prefix + leaf] = getattr(part, leaf).detach()
        own = {
            **dict(part.named_parameters(recurse=False)),
            **dict(part.named_buffers(recurse=False)),
        }
        if ".parametrizations" not in f".{name}":
            found |= {prefix + leaf: value.detach() for leaf, value in own.items()}
    return {name: value.cpu() for name, value in found.items()}


def _is_pytorchs(part: nn.Module) -> bool:
    """Whether a module runs PyTorch's own code, maybe under a name of its own."""
    return any(isinstance(part, kind) and type(part).forward is kind.forward for kind in _KNOWN)


def _activations(inside: Mapping[str, nn.Module]) -> dict[str, Activation]:
    """Tell the nonlinearity of Elman cells, which PyTorch keeps in the module."""
    return {
        prefix: RELU if part.nonlinearity == "relu" else TANH
        for prefix, part in inside.items()
        if isinstance(part, nn.RNN | nn.RNNCell | dynamic.RNNCell)
    }


def _class(part: nn.Module) -> str:
    return f"{type(part).__module__}.{type(part).__qualname__}"


def _sha256(tensors: Mapping[str, Tensor]) -> str:
    """Hash names, shapes and bytes, as a file of the same weights would be told apart."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"|{name} {tensor.dtype} {tuple(tensor.shape)}=".encode())
        plain = tensor.dequantize() if tensor.is_quantized else tensor
        digest.update(plain.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
