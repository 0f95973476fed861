"""PyTorch files that need code to be read: unpickled, but only for a user who asked for it."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import torch

from rnnaudit.errors import LoadError
from rnnaudit.loaders.interface import brief
from rnnaudit.loaders.module import read_module
from rnnaudit.loaders.named import Source, read_model
from rnnaudit.loaders.nested import modules, named_tensors
from rnnaudit.loaders.state_dict import LOADER
from rnnaudit.model import Model

_IN_SCRIPT = re.compile(r"Can't get attribute '(?P<name>.+?)' on <module '(?:[\w.]+\.)?__main__'")
"""What unpickling says of a class of the script that was run, which no other program has.

`python -m package` calls its own script `package.__main__`."""


def load(path: Path, sha256: str) -> Model:
    """Unpickle a file, and read the module in it, or else its named tensors.

    Raises:
        LoadError: The file is damaged, needs a class that is not installed, or holds
            several modules.
        UnsupportedModelError: It holds no recurrence that can be read.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=False)
    except (AttributeError, ImportError) as error:
        in_script = _IN_SCRIPT.match(str(error))
        needed = f"__main__.{in_script['name']}" if in_script else brief(error)
        raise LoadError(
            f"unpickling {path} needs a class that is not here: {needed}",
            help="save model.state_dict() in the script that defines it, or import the class from "
            "a module there"
            if in_script
            else "run where the code that made it is installed, or save a state_dict there",
            id="RA103",
        ) from None
    except Exception as error:
        raise LoadError(
            f"unpickling {path} raised {type(error).__name__}: {brief(error)}",
            help="write or download it again",
        ) from None
    found = modules(content)
    if len(found) > 1:
        raise LoadError(
            f"one pickled module was expected, and {path} holds {len(found)} "
            f"({', '.join(name or 'the root' for name in list(found)[:3])})",
            help="save the state_dict of the one you mean",
        )
    if found:
        return read_module(next(iter(found.values())), path)
    return read_model(named_tensors(content), Source(path, LOADER.name, sha256))
