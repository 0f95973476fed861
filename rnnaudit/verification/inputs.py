"""The inputs that two models are run on: lengths × batch sizes × sources, seeded.

Lengths are those where a truncated model can go wrong: 1, k − 1, k, k + 1, 4k and 1000.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rnnaudit.data import UNNAMED, Data, InputRange, fitting_width
from rnnaudit.errors import LoadError, UnsupportedModelError
from rnnaudit.estimators.probes import synthetic_within
from rnnaudit.reports.numbers import counted
from rnnaudit.verification.judge import Tried
from rnnaudit.verification.slots import Role, Roles, Slot

Array = np.ndarray[Any, Any]

BATCHES = (1, 3)
SYNTHETIC = ("normal", "saturating")
FEWEST_SIZES = 4
"""Where the graph fixes most sizes, each is tried again with other values, up to so many."""

MOST_CHOICES = 8
"""Combinations of deciding inputs (flags, say) that are tried."""

SATURATION = 4.0
"""Saturating inputs are ±4 at random: most gates are then fully open or shut."""

WITHOUT_DEPTH = (1, 2, 7, 64, 256)
"""Lengths where no depth is known."""

LONG = (1024, 4096, 16384)
"""Lengths tried as well where steps of the input are not steps of the recurrence."""

FAR = 1000
"""Steps after which a state that drifts has gone somewhere, whatever the depth."""

MOST_STEPS = 50_000
"""Steps of the user's sequences that are also run in full length; the rest is counted."""


@dataclass(frozen=True, slots=True, eq=False)
class Feed:
    """One run's arrays by graph-input name, and what is known of them.

    ``own`` says that the sequences are the user's, ``whole`` that they run in full length.
    """

    tried: Tried
    values: Mapping[str, Array]
    own: bool = False
    whole: bool = False

    @property
    def cost(self) -> int:
        """Steps times sequences."""
        return self.tried.batch * self.tried.length


def lengths(
    depths: Iterable[int], blocks: Iterable[int] = (), *, traced: bool = True
) -> tuple[int, ...]:
    """Return the lengths to try for recurrences cut to these depths in these blocks, ascending."""
    depths = set(depths)
    wanted = {1, *(WITHOUT_DEPTH if not depths else ()), *(() if traced else LONG)}
    for k in {min(depths), max(depths)} if depths else ():
        wanted |= {k - 1, k, k + 1}
    if depths:
        wanted |= {4 * max(depths), FAR}
        for block in set(blocks) - {1}:  # one block, and a step or more beyond
            wanted |= {max(depths) - 1 + block, max(depths) + block, max(depths) + 3 * block}
    return tuple(sorted(t for t in wanted if t >= 1))


Box = tuple[Array, Array]
"""Smallest and largest value of each feature [F] that inputs may take."""


def feeds(
    slots: Sequence[Slot],
    wanted: Sequence[int],
    data: Data | None,
    seed: int,
    boxes: Mapping[str, Box] | None = None,
) -> list[Feed]:
    """Make every input, cheapest first; axes that are fixed keep their size.

    Args:
        slots: The graph inputs.
        wanted: Lengths for inputs whose time axis is dynamic.
        data: The user's sequences, put where they belong beside synthetic other inputs.
        seed: Of everything random.
        boxes: Where the synthetic values of an input must stay, by its name.

    Raises:
        LoadError: The data fit no input.
    """
    batches = _chosen(slots, "batch", BATCHES)
    sizes = [(n, t) for t in _chosen(slots, "time", wanted) for n in batches]
    made = []
    # Every choice is made at every size: a branch that never ran was never compared.
    turns = min(math.prod(len(slot.choices) or 1 for slot in slots), MOST_CHOICES)
    turns = max(turns, math.ceil(FEWEST_SIZES / len(sizes)))
    for number, (n, t) in enumerate(sizes * turns):
        for kind, source in enumerate(SYNTHETIC):
            rng = np.random.default_rng([seed, number, kind])
            values = {slot.name: _synthetic(slot, source, n, t, rng) for slot in slots}
            for slot in slots:
                if boxes and slot.name in boxes:
                    values[slot.name] = _within(slot, values[slot.name], boxes[slot.name])
            values |= _choice(slots, number // len(sizes), n, t)
            made.append(Feed(Tried(f"{source} {n}×{t}", n, t), values))
    if data is not None:
        made += _from_data(slots, sizes, data, seed)
    return sorted(made, key=lambda feed: feed.cost)


def _chosen(slots: Sequence[Slot], role: Role, wanted: Sequence[int]) -> Sequence[int]:
    """Return the sizes to try: those wanted, unless the graph fixes one or has no such axis."""
    fixed = [size for slot in slots if (size := slot.fixed(role)) is not None]
    if fixed:
        return fixed[:1]
    return wanted if any(role in slot.roles for slot in slots) else (1,)


def _choice(slots: Sequence[Slot], turn: int, n: int, t: int) -> dict[str, Array]:
    """Return the values of inputs that decide which part of a graph runs, on the given turn."""
    made = {}
    for slot in slots:
        if slot.choices:
            turn, which = divmod(turn, len(slot.choices))
            made[slot.name] = np.full(
                slot.shape(n, t), slot.choices[which], numpy_dtype(slot.dtype)
            )
    return made


def _synthetic(slot: Slot, source: str, n: int, t: int, rng: np.random.Generator) -> Array:
    shape, dtype = slot.shape(n, t), numpy_dtype(slot.dtype)
    if slot.fill == "zeros":
        return np.zeros(shape, dtype)
    if slot.fill == "choices":
        return np.full(shape, slot.choices[-1], dtype)
    if slot.fill == "lengths":
        return np.full(shape, t, dtype)
    if slot.fill == "tokens":
        # Saturating for tokens: the same one again and again.
        drawn = rng.integers(0, slot.tokens, shape if source == "normal" else (1,) * len(shape))
        return np.broadcast_to(drawn, shape).astype(dtype)
    if source == "saturating":
        return (SATURATION * rng.choice([-1.0, 1.0], shape)).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def _within(slot: Slot, values: Array, box: Box) -> Array:
    """Scale values to a box's middle and half-width and cut off what is outside."""
    x = sequences_of(values, slot.roles).astype(np.float64)
    low, high = (end.reshape(x.shape[2:]) for end in box)
    x = np.clip((low + high) / 2 + x * (high - low) / 2, low, high).astype(values.dtype)
    # Rounding to the input's type may step outside again: move such values back.
    x = np.where(x < low, np.nextafter(x, np.inf, dtype=x.dtype), x)
    x = np.where(x > high, np.nextafter(x, -np.inf, dtype=x.dtype), x)
    return ordered(x, slot.roles)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy type of an ONNX type's name.

    Raises:
        UnsupportedModelError: NumPy has no such numbers.
    """
    try:
        dtype = np.dtype({"float": "float32", "double": "float64"}.get(name, name))
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in "fiub":
        raise UnsupportedModelError(
            f"graph inputs must be numbers that NumPy has, got {name}",
            help="verify a float32 export",
            id="RA304",
        )
    return dtype


def _from_data(
    slots: Sequence[Slot], sizes: Sequence[tuple[int, int]], data: Data, seed: int
) -> list[Feed]:
    """Cut the user's sequences to the lengths wanted, and take them whole."""
    owners = {_owner(slots, name, data): sequences for name, sequences in data.inputs.items()}
    made = []
    order = np.random.default_rng([seed, 2**16]).permutation(data.count).tolist()
    plans = [(n, t, [i for i in order if data.lengths[i] >= t][:n]) for n, t in sizes]
    plans = [plan for plan in plans if plan[2]]
    cut = len(plans)
    plans += _whole(slots, data, order)
    for number, (n, t, chosen) in enumerate(plans):
        rows = [chosen[i % len(chosen)] for i in range(n)]
        rng = np.random.default_rng([seed, number, len(SYNTHETIC)])
        values = {slot.name: _synthetic(slot, "normal", n, t, rng) for slot in slots}
        for slot, sequences in owners.items():
            given = np.stack([np.asarray(sequences[i])[:t] for i in rows])
            values[slot.name] = arrange(given, slot, data.source)
        which = f"sequence {rows[0]}" if n == 1 else f"sequences {', '.join(map(str, rows))}"
        tried = Tried(f"data {which}, {n}×{t}", n, t)
        made.append(Feed(tried, values, own=True, whole=number >= cut))
    return made


def _whole(
    slots: Sequence[Slot], data: Data, order: Sequence[int]
) -> list[tuple[int, int, list[int]]]:
    """Return batch, steps and sequences of each run of the data in full length, in this order.

    Where the graph fixes the steps, a sequence's first ones are all of it that runs.
    """
    n = _chosen(slots, "batch", (1,))[0]
    steps = [_chosen(slots, "time", (length,))[0] for length in data.lengths]
    fitting = [i for i in order if data.lengths[i] >= steps[i]]
    within = itertools.accumulate(steps[i] for i in fitting)
    kept = [i for i, sum_ in zip(fitting, within, strict=True) if sum_ <= MOST_STEPS]
    runs = []
    for t in dict.fromkeys(steps[i] for i in kept or fitting[:1]):
        alike = [i for i in kept or fitting[:1] if steps[i] == t]
        runs += [(n, t, alike[first : first + n]) for first in range(0, len(alike), n)]
    return runs


def beyond(made: Sequence[Feed], data: Data | None) -> tuple[str, ...]:
    """Say how many of the user's sequences none of these feeds runs in full length, if any."""
    whole = sum(feed.tried.batch for feed in made if feed.whole)
    if data is None or data.count <= whole:
        return ()
    all_ = counted(data.count, "sequence")
    return (f"{data.count - whole} of {all_} of the data beyond {MOST_STEPS:,} steps",)


def _owner(slots: Sequence[Slot], name: str, data: Data) -> Slot:
    named = [slot for slot in slots if slot.name == name]
    fitting = named or [slot for slot in slots if slot.main and name == UNNAMED]
    if not fitting and name == UNNAMED:
        width = data.width(name)
        fitting = [slot for slot in slots if slot.features == width or len(slots) == 1]
    if not fitting:
        wanted = ", ".join(slot.name for slot in slots)
        raise LoadError(
            f"the data must name one of the model's inputs {wanted}, got {name or 'no name'} "
            f"from {data.source}",
            help="name the array in the .npz file after the input",
            id="RA107",
        )
    (slot, *_), width = fitting, data.width(name)
    if width != slot.features:
        raise _unfit(slot, width, data.source, fitting_width(data, name, slot.features))
    return slot


def _unfit(slot: Slot, width: int, source: str, advice: str) -> LoadError:
    return LoadError(
        f"the data must have {counted(slot.features, 'feature')} per step for input {slot.name}, "
        f"got {width} from {source}",
        help=advice,
        id="RA107",
    )


def arrange(sequences: Array, slot: Slot, source: str) -> Array:
    """Bring sequences [N, T, F] into the order of an input's axes.

    Raises:
        LoadError: F is not what the input takes.
    """
    n, t, width = sequences.shape
    if width != slot.features:
        raise _unfit(slot, width, source, "give sequences [time, features] of that width")
    inner = [size or 1 for role, size in zip(slot.roles, slot.sizes, strict=True) if role is None]
    return ordered(sequences.reshape(n, t, *inner), slot.roles).astype(numpy_dtype(slot.dtype))


def ordered(array: Array, roles: Roles) -> Array:
    """Bring an array [N, T, …] into the order of these axes; an axis they lack is dropped."""
    features = iter(range(2, array.ndim))
    order = [{"batch": 0, "time": 1}[role] if role else next(features) for role in roles]
    absent = [axis for axis in (0, 1) if axis not in order]
    return np.ascontiguousarray(array.transpose(*absent, *order)[(0,) * len(absent)])


def sequences_of(array: Array, roles: Roles) -> Array:
    """Bring an array with these axes into the order [N, T, …]; an axis they lack has length 1."""
    wanted = [roles.index(role) for role in ("batch", "time") if role in roles]
    rest = [axis for axis, role in enumerate(roles) if role is None]
    moved = array.transpose(*wanted, *rest)
    if "batch" not in roles:
        moved = moved[None]
    return moved if "time" in roles else moved[:, None]


def probe_feeds(
    slots: Sequence[Slot],
    sequences: int,
    length: int,
    seed: int,
    input_range: InputRange | None = None,
) -> list[Feed]:
    """Make synthetic sequences of one length for measuring, one a feed where the batch is free.

    Inputs that recurrences read get the audit's synthetic mix, its kinds in turn from row to
    row and feed to feed; the others normal numbers, random tokens or zeros, as they take.
    """
    n = _chosen(slots, "batch", (1,))[0]
    t = _chosen(slots, "time", (length,))[0]
    total = n * math.ceil(sequences / n)
    drawn = {
        slot.name: synthetic_within(
            slot.features, sequences=total, length=t, seed=seed, input_range=input_range
        )
        for slot in slots
        if slot.main and slot.fill == "values"
    }
    made = []
    for first in range(0, total, n):
        rng = np.random.default_rng([seed, first])
        values = {slot.name: _synthetic(slot, "normal", n, t, rng) for slot in slots}
        for slot in slots:
            if slot.name in drawn:
                rows = drawn[slot.name][first : first + n].numpy()
                values[slot.name] = arrange(rows, slot, "synthetic inputs")
        made.append(Feed(Tried(f"synthetic {n}×{t}", n, t), values))
    return made


def data_feeds(slots: Sequence[Slot], data: Data, seed: int) -> list[Feed]:
    """Make one feed of each of the user's sequences, whole; a fixed batch repeats the sequence.

    Raises:
        LoadError: The data fit no input, or not the steps that the graph fixes.
    """
    owners = {_owner(slots, name, data): sequences for name, sequences in data.inputs.items()}
    n = _chosen(slots, "batch", (1,))[0]
    made = []
    for i, steps in enumerate(data.lengths):
        fixed = _chosen(slots, "time", (steps,))[0]
        if steps < fixed:
            raise LoadError(
                f"sequences must have at least the {fixed} steps that the graph fixes, got "
                f"{steps} from {data.source}",
                help="give longer sequences",
                id="RA107",
            )
        rng = np.random.default_rng([seed, i])
        values = {slot.name: _synthetic(slot, "normal", n, fixed, rng) for slot in slots}
        for slot, arrays in owners.items():
            cut = np.stack([np.asarray(arrays[i])[:fixed]] * n)
            values[slot.name] = arrange(cut, slot, data.source)
        made.append(Feed(Tried(f"data sequence {i}", n, fixed), values, own=True))
    return made
