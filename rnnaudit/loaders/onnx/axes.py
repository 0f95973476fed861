"""Axes that are known by what they are made of: sizes, atoms, and layouts of an earlier value."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import onnx_ir as ir

_fresh = itertools.count()


@dataclass(frozen=True, slots=True)
class Size:
    """factor × the product of named axes; names that begin with ``?`` stand for any integer."""

    factor: int
    axes: tuple[str, ...]

    @staticmethod
    def unknown() -> Size:
        """Return a number of which nothing is known."""
        return Size(1, (f"?{next(_fresh)}",))

    @property
    def is_axis(self) -> bool:
        """Whether this is the length of something, so not negative."""
        return self.factor >= 0 and not any(name.startswith("?") for name in self.axes)


@dataclass(frozen=True, slots=True)
class Atom:
    """One axis that is never split; ``size`` None where the input decides it."""

    name: str
    size: int | None = None


Axis = tuple[Atom, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """How a value is a rearrangement of ``origin``: the atoms of each axis."""

    origin: ir.Value
    axes: tuple[Axis, ...]

    def sizes(self) -> list[Size | int]:
        """Return the length of each axis."""
        return [length(axis) for axis in self.axes]


def axis(*atoms: Atom) -> Axis:
    """Make an axis of atoms; those of length 1 do not count."""
    return tuple(atom for atom in atoms if atom.size != 1)


def length(axis_: Axis) -> Size | int:
    """Return an axis's length, a number where every atom has one."""
    factor = math.prod(atom.size for atom in axis_ if atom.size is not None)
    names = tuple(sorted(atom.name for atom in axis_ if atom.size is None))
    return Size(factor, names) if names else factor
