"""Sequences to measure on, from a file, a folder of files, or a function of the user's.

A sequence is an array [T, F]. Floats become float64 and integers int64, which is exact
for every stored value up to 2⁵³; whatever is not a finite number is refused by name.
Code runs in one case only: when the specification has the form ``module:function``.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from rnnaudit.errors import LoadError, UsageError
from rnnaudit.reports.numbers import counted
from rnnaudit.results import ARRAYS

Array = NDArray[Any]

UNNAMED = ""
"""The key of sequences that do not say which graph input they belong to."""

MAX_YIELDED = 100_000
"""A function that yields more sequences than this is taken to be endless."""

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_TEXT_DELIMITERS = (",", ";", "\t")


@dataclass(frozen=True, slots=True, eq=False)
class Data:
    """Sequences by graph-input name (``""`` where the source names none).

    Every input has the same number of sequences; sequence i of each belongs together.
    ``source`` is the specification as given.
    """

    inputs: Mapping[str, tuple[Array, ...]]
    source: str

    @property
    def count(self) -> int:
        """Number of sequences."""
        return len(self._first)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Steps T of each sequence (of the first input)."""
        return tuple(len(x) for x in self._first)

    @property
    def _first(self) -> tuple[Array, ...]:
        return next(iter(self.inputs.values()))

    def width(self, name: str = UNNAMED) -> int:
        """Return F of an input's sequences."""
        return int(self.inputs[name][0].shape[1])

    def without(self, places: Collection[int]) -> Data:
        """Return the sequences that do not stand in these places."""
        kept = [i for i in range(self.count) if i not in places]
        return Data(
            {name: tuple(xs[i] for i in kept) for name, xs in self.inputs.items()}, self.source
        )

    def describe(self) -> str:
        """Say how many sequences there are, of which lengths, and where they came from."""
        shortest, longest = min(self.lengths), max(self.lengths)
        steps = counted(longest, "step")
        steps = steps if shortest == longest else f"{shortest} to {steps}"
        return f"{counted(self.count, 'sequence')} of {steps} from {Path(self.source).name}"


InputRange = tuple[float, float] | Literal["one-hot"]
"""The inputs that proofs and counterexamples speak of: bounds of all features, or tokens."""


def parse_range(text: str) -> InputRange:
    """Read an input range ``LO:HI``, or ``one-hot``.

    Raises:
        UsageError: Neither that nor two finite numbers with LO < HI.
    """
    if text == "one-hot":
        return "one-hot"
    try:
        low, high = (float(part) for part in text.split(":"))
    except ValueError:
        low = high = np.nan
    if not (np.isfinite(low) and np.isfinite(high) and low < high):
        raise UsageError(
            f"an input range must be LO:HI, two finite numbers with LO < HI, or one-hot, "
            f"got {text!r}",
            help="for example -1:1",
        )
    return low, high


def load_data(spec: str, *, batch_axis: int | None = None, time_axis: int | None = None) -> Data:
    """Read sequences from ``spec``.

    Args:
        spec: A .npy, .npz, .safetensors, .csv or .wav file, a folder of them, or
            ``module:function``. In an archive the key ``x``, or the only key, holds the
            sequences; several keys are graph-input names; an integer ``lengths`` says
            that the others are sequences joined along time.
        batch_axis: The axis that counts sequences; of three axes the first that is left
            unless given. With two axes, naming it says that the array is [N, T] with F = 1.
        time_axis: The axis that counts steps; the first that is left unless given.

    Raises:
        LoadError: The source is missing, unreadable, empty, or not finite numbers [T, F].
    """
    axes = _Axes(batch_axis, time_axis)
    path = Path(spec)
    if not path.exists() and _FUNCTION.fullmatch(spec):
        items = _counted(_called(spec))
    elif not path.exists():
        raise _refuse(
            f"data must be a file, a folder or module:function, got {spec}, which does not exist"
        )
    elif path.is_dir():
        items = _folder(path, axes)
    else:
        items = _counted(_file(path, axes))
    return Data(_collect(items, spec), spec)


def turned_at(data: Data, name: str, width: int) -> bool:
    """Whether every sequence of an input has as many steps as it should have features."""
    return {len(x) for x in data.inputs[name]} == {width}


def fitting_width(data: Data, name: str, width: int | None) -> str:
    """Say how to give an input sequences of a width; the two axes may have changed places."""
    if width is None or not turned_at(data, name, width):
        return "give sequences [time, features] of that width"
    if data.source == ARRAYS:
        return f"each has {counted(width, 'step')}: transpose them, they are [time, features]"
    return f"each has {counted(width, 'step')}: name the axis of the steps with --time-axis"


def of_arrays(arrays: object) -> Data:
    """Take sequences from memory: an array [T, F] or [N, T, F], or a list of arrays [T, F].

    A mapping holds one of these for each graph input. PyTorch tensors count as arrays.

    Raises:
        LoadError: They are not finite numbers of these shapes.
    """
    where = "the data"
    by_name = arrays if isinstance(arrays, Mapping) else {UNNAMED: arrays}
    parts = {str(name): _sequences(value, where) for name, value in by_name.items()}
    if len({len(sequences) for sequences in parts.values()}) != 1:
        counts = {name: len(sequences) for name, sequences in parts.items()}
        raise _refuse(f"{where}: wanted as many sequences for each input, got {counts}")
    count = len(next(iter(parts.values())))
    samples = ({name: xs[i] for name, xs in parts.items()} for i in range(count))
    return Data(_collect(_counted(samples), where), ARRAYS)


def _sequences(value: object, where: str) -> list[Array]:
    if isinstance(value, (list, tuple)) and all(np.ndim(x) == 2 for x in value):
        return [_numbers(x, where) for x in value]
    return _Axes(None, None).split(_numbers(value, where), where)


def _refuse(message: str, advice: str = "") -> LoadError:
    return LoadError(message, help=advice, id="RA107")


# ----------------------------------------------------------------- arrays to sequences


@dataclass(frozen=True, slots=True)
class _Axes:
    batch: int | None
    time: int | None

    def split(self, array: Array, where: str) -> list[Array]:
        """Split an array into its sequences [T, F]."""
        if array.ndim == 1:
            return [array[:, None]]
        if array.ndim == 2 and self.batch is None:
            return [np.moveaxis(array, self._axis(self.time or 0, array, where), 0)]
        if array.ndim not in (2, 3):
            raise _refuse(
                f"{where}: wanted sequences [T, F] or [N, T, F], got shape {array.shape}",
                "flatten what is left of each step into one axis",
            )
        batch, time = (
            None if axis is None else self._axis(axis, array, where)
            for axis in (self.batch, self.time)
        )
        if batch is None:
            batch = 1 if time == 0 else 0
        if time is None:
            time = 1 if batch == 0 else 0
        if batch == time:
            raise UsageError(
                f"--batch-axis and --time-axis must differ, got {batch} for both",
                help="for [T, N, F] give --batch-axis 1 --time-axis 0",
            )
        moved = np.moveaxis(array, (batch, time), (0, 1))
        return list(moved if array.ndim == 3 else moved[..., None])

    @staticmethod
    def _axis(axis: int, array: Array, where: str) -> int:
        if not -array.ndim <= axis < array.ndim:
            raise UsageError(
                f"an axis of {where} must lie below {array.ndim}, got {axis}",
                help=f"its shape is {array.shape}",
            )
        return axis % array.ndim


Sample = dict[str, Array]
"""One sequence: an array [T, F] for each input it feeds."""


def _numbers(value: object, where: str) -> Array:
    """Return an array of float64 or int64, all finite."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _refuse(f"{where}: wanted an array of numbers, got {type(value).__name__}") from error
    if array.dtype.kind in "biu":
        if array.size and int(array.max()) > np.iinfo(np.int64).max:
            raise _refuse(f"{where}: wanted integers below 2⁶³, got {array.max()}")
        return array.astype(np.int64)
    if array.dtype.kind != "f":
        raise _refuse(
            f"{where}: wanted an array of numbers, got dtype {array.dtype}",
            "save a rectangular float or integer array",
        )
    numbers = array.astype(np.float64)
    if not np.isfinite(numbers).all():
        at = tuple(int(i) for i in np.argwhere(~np.isfinite(numbers))[0])
        raise _refuse(
            f"{where}: wanted finite numbers, got {numbers[at]} at index {at}",
            "drop or repair that sequence",
        )
    return numbers


def _named(arrays: Mapping[str, object], axes: _Axes, where: str) -> Iterator[Sample]:
    """Split the arrays of one archive into sequences; the only array and ``x`` are unnamed."""
    if not arrays:
        raise _refuse(f"{where}: wanted at least one array, got none")
    left = dict(arrays)
    lengths = left.pop("lengths", None) if len(left) > 1 else None
    names = {name: UNNAMED if len(left) == 1 else name for name in left}
    parts: dict[str, list[Array]] = {}
    for name, value in left.items():
        array = _numbers(value, f"{where}, key {name!r}")
        parts[names[name]] = (
            axes.split(array, f"{where}, key {name!r}")
            if lengths is None
            else _joined(array, lengths, f"{where}, key {name!r}")
        )
    counts = {name: len(sequences) for name, sequences in parts.items()}
    if len(set(counts.values())) > 1:
        raise _refuse(
            f"{where}: wanted as many sequences for each input, got {counts}",
            "--batch-axis and --time-axis name the axes",
        )
    for i in range(next(iter(counts.values()))):
        yield {name: sequences[i] for name, sequences in parts.items()}


def _joined(array: Array, lengths: object, where: str) -> list[Array]:
    """Split sequences that were joined along time, [ΣT] or [ΣT, F], by their lengths."""
    sizes = _numbers(lengths, f"{where}: its lengths")
    if array.ndim not in (1, 2) or sizes.ndim != 1 or sizes.dtype.kind != "i":
        raise _refuse(
            f"{where}: wanted [ΣT, F] beside integer lengths [N], "
            f"got shape {array.shape} beside {sizes.dtype} {sizes.shape}"
        )
    if (sizes < 1).any():
        raise _refuse(f"{where}: wanted lengths of at least 1 step, got {sizes.min()}")
    if (total := sum(sizes.tolist())) != len(array):
        raise _refuse(f"{where}: wanted lengths that add up to {len(array)} steps, got {total}")
    steps = array[:, None] if array.ndim == 1 else array
    return np.split(steps, np.cumsum(sizes)[:-1])


def _counted(samples: Iterable[Sample]) -> Iterator[tuple[str, Sample]]:
    for i, sample in enumerate(samples):
        yield f"sequence {i}" if i else "the first sequence", sample


def _collect(items: Iterator[tuple[str, Sample]], spec: str) -> dict[str, tuple[Array, ...]]:
    """Gather named sequences by input, checked to be nonempty and of one width each."""
    sequences = list(items)
    if not sequences:
        raise _refuse(f"{spec}: wanted at least one sequence, got none")
    first, names = sequences[0][0], sequences[0][1].keys()
    for where, sequence in sequences:
        if sequence.keys() != names:
            raise _refuse(
                f"{spec}: wanted inputs {sorted(names)} as in {first}, "
                f"got {sorted(sequence)} in {where}"
            )
        for name, x in sequence.items():
            width = sequences[0][1][name].shape[1]
            if x.size == 0:
                raise _refuse(
                    f"{spec}: wanted at least one step and one feature, "
                    f"got shape {x.shape} in {where}"
                )
            if x.shape[1] != width:
                raise _refuse(
                    f"{spec}: wanted {counted(width, 'feature')} as in {first}, "
                    f"got {x.shape[1]} in {where}"
                )
    return {name: tuple(np.ascontiguousarray(s[name]) for _, s in sequences) for name in names}


# ------------------------------------------------------------------------------ files


def _file(path: Path, axes: _Axes) -> Iterator[Sample]:
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise _refuse(
            f"data must be one of {', '.join(READERS)}, got {path.name}",
            "numpy.save writes an array as .npy",
        )
    try:
        arrays = reader(path)
    except (OSError, ValueError, EOFError, BadZipFile, MemoryError, KeyError) as error:
        raise _refuse(
            f"{path}: cannot be read as {path.suffix.lower()}: {_first_line(error)}"
        ) from error
    if isinstance(arrays, dict):
        yield from _named(arrays, axes, str(path))
    else:
        for x in axes.split(_numbers(arrays, str(path)), str(path)):
            yield {UNNAMED: x}


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _folder(folder: Path, axes: _Axes) -> Iterator[tuple[str, Sample]]:
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.suffix.lower() in READERS)
    if not files:
        raise _refuse(f"{folder}: wanted a folder of {', '.join(READERS)} files, got none of them")
    for path in files:
        for sample in _file(path, axes):
            yield path.name, sample


def _npy(path: Path) -> object:
    if path.stat().st_size == 0:
        raise ValueError("the file is empty")
    return np.load(path, allow_pickle=False)


def _npz(path: Path) -> object:
    with path.open("rb") as file:
        archive = np.load(file, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise ValueError("it holds one array; name it .npy")
        return {name: archive[name] for name in archive.files}


def _safetensors(path: Path) -> object:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return dict(load_file(path))
    except (SafetensorError, TypeError) as error:  # TypeError: a dtype that numpy lacks
        raise ValueError(_first_line(error)) from error


def _csv(path: Path) -> object:
    """Read one sequence: a row is a step; one header line, without numbers, is allowed."""
    lines = [line for line in path.read_text("utf-8-sig").splitlines() if line.strip()]
    head = lines[0] if lines else ""
    delimiter = next((d for d in _TEXT_DELIMITERS if d in head), None)  # else white space
    if lines and not any(_numeric(cell) for cell in head.split(delimiter)):
        lines = lines[1:]
    if not lines:
        raise ValueError("it holds no row of numbers")
    return np.loadtxt(lines, delimiter=delimiter, ndmin=2, comments=None)


def _numeric(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _wav(path: Path) -> object:
    """Read samples as [T] or [T, channels]; integer PCM is scaled to ±1."""
    from scipy.io import wavfile

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", wavfile.WavFileWarning)  # unknown chunks are skipped
        try:
            _, samples = wavfile.read(path)
        except Exception as error:  # malformed headers end in errors of every kind
            raise ValueError(f"its header or samples make no sense ({error})") from error
    if samples.dtype == np.uint8:
        return (samples.astype(np.float64) - 128) / 128
    if samples.dtype.kind == "i":
        return samples.astype(np.float64) / -float(np.iinfo(samples.dtype).min)
    return samples


READERS: Mapping[str, Callable[[Path], object]] = {
    ".npy": _npy,
    ".npz": _npz,
    ".safetensors": _safetensors,
    ".csv": _csv,
    ".wav": _wav,
}


# -------------------------------------------------------------------------- functions


def _called(spec: str) -> Iterator[Sample]:
    """Call ``module:function`` and read the dicts (or single arrays) that it yields."""
    module, _, name = spec.partition(":")
    function = getattr(_imported(module, spec), name, None)
    if not callable(function):
        raise _refuse(f"{spec}: wanted a function {name!r} in {module}, got none")
    try:
        for i, item in enumerate(function()):
            if i == MAX_YIELDED:
                raise _refuse(f"{spec}: wanted at most {MAX_YIELDED} sequences, got more")
            arrays = item if isinstance(item, Mapping) else {UNNAMED: item}
            yield {
                str(key): _step_major(value, f"{spec}, item {i}") for key, value in arrays.items()
            }
    except LoadError:
        raise
    except Exception as error:
        raise _refuse(
            f"{spec}: the function raised {type(error).__name__}: {_first_line(error)}"
        ) from error


def _imported(module: str, spec: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise _refuse(
            f"{spec}: importing {module} raised {type(error).__name__}: {_first_line(error)}"
        ) from error
    finally:
        sys.path.remove(str(Path.cwd()))


def _step_major(value: object, where: str) -> Array:
    array = _numbers(value, where)
    if array.ndim not in (1, 2):
        raise _refuse(f"{where}: wanted one sequence [T, F], got shape {array.shape}")
    return array if array.ndim == 2 else array[:, None]
