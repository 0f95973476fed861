"""What a proof of contraction says: a rate in a named norm, and the depth that follows from it.

A certificate speaks of one recurrence, one set of inputs (`Domain`) and the states that
those inputs can reach from the recurrence's initial state.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Protocol

import torch
from torch import Tensor

from rnnaudit.errors import UsageError
from rnnaudit.model import Cell, Readout, Recurrence
from rnnaudit.norms import up
from rnnaudit.results import NoProof, Norm, UpperBound

DEEPEST = 1_000_000
"""Depths beyond this are not worth naming: ``depth`` answers None."""

_LOST = 1e-300
"""Exceeds what underflow can lose in one product of numbers up to 1."""


@dataclass(frozen=True, slots=True, eq=False)
class Domain:
    """The inputs that a proof covers: lo ≤ x ≤ hi per feature ([I] or one number for all).

    Infinite ends mean any input on that side. ``name`` is how a report writes it.
    """

    lo: Tensor | float = -1.0
    hi: Tensor | float = 1.0
    name: str = "|x| ≤ 1"

    def box(self, size: int) -> tuple[Tensor, Tensor]:
        """Return the ends [I] in float64.

        Raises:
            UsageError: The ends do not fit the input width, or are NaN, or lo > hi.
        """
        ends = []
        for end in (self.lo, self.hi):
            value = torch.as_tensor(end, dtype=torch.float64)
            if value.ndim and tuple(value.shape) != (size,):
                raise UsageError(
                    f"the input range must be one number or {size}, got {tuple(value.shape)}"
                )
            ends.append(value.expand(size).clone())
        lo, hi = ends
        if bool((~(lo <= hi)).any()):
            raise UsageError("the input range must have LO ≤ HI for every feature")
        return lo, hi


class Certificate(Protocol):
    """A proof that differences of states shrink, and how fast."""

    @property
    def method(self) -> str:
        """The name of the method, as reports print it."""
        ...

    @property
    def bound(self) -> UpperBound:
        """The rate λ, rounded up, with the norm that it holds in."""
        ...

    def depth(
        self,
        eps: float,
        readout: Readout | None = None,
        norm: Norm = "max",
        radius: float | None = None,
    ) -> int | None:
        """Return the smallest k that is proved to suffice, together with every larger depth.

        The error is ‖y − y^k‖ of the output h, or of ``readout(h)``, per unit (``max``) or
        in the 2-norm; the restart is from the initial state, and the true state is any
        that the domain can reach. With ``radius`` it is instead any state whose difference
        from the restart has a 2-norm of at most ``radius``. None: no depth is proved.
        """
        ...

    def gauges(self) -> tuple[Gauge, ...]:
        """Return the norms of this proof, for composition; empty where it has none."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Gauge:
    """A norm in which a recurrence contracts, reduced to what composition needs of it.

    Attributes:
        rate: λ < 1.
        radius: Bound on the norm of s − s_start over the reachable states.
        units: Bound on |h_i| [H] per unit of the norm.
        measure: Maps r [S] to a bound on the norm over the box |δ| ≤ r; linear in scale.
    """

    rate: float
    radius: float
    units: Tensor
    measure: Callable[[Tensor], float]

    @property
    def room(self) -> float:
        """1 − λ from below."""
        return math.nextafter(1 - self.rate, 0)

    def at(self, k: int) -> float:
        """Bound λᵏ · radius from above."""
        return up(self.radius * power_above(self.rate, k), 2) + _LOST


@dataclass(frozen=True, slots=True, eq=False)
class Dynamics:
    """What is known of a recurrence apart from any method.

    Attributes:
        outputs: Ends [H] of a box that holds every reachable output.
        gain: Bound [S, I] on |∂s'/∂x| entrywise.
        states: Ends [S] of a box that holds every reachable state.
        balls: Where the states also lie in balls, one for each part of the state: their
            centre [S], how far states are from it per unit [S], and radii.
    """

    outputs: tuple[Tensor, Tensor]
    gain: Tensor
    states: tuple[Tensor, Tensor]
    balls: tuple[Tensor, Tensor, tuple[float, ...]] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CertificateSet:
    """Every proof that was found, best first, or why there is none.

    Attributes:
        certificates: The proofs, the one with the smallest depth at ε = 1e-3 first.
        no_proof: Why there is none.
        failures: The methods that proved nothing, and why.
        dynamics: What composition needs beside the proofs; None where nothing is known.
        cut: Whether the time ended before the search for them did.
    """

    certificates: tuple[Certificate, ...]
    no_proof: NoProof | None = None
    failures: tuple[tuple[str, str], ...] = ()
    dynamics: Dynamics | None = None
    cut: bool = False

    @property
    def outputs(self) -> tuple[Tensor, Tensor] | None:
        """Ends [H] of a box that holds every reachable output, where one is known."""
        return None if self.dynamics is None else self.dynamics.outputs

    @property
    def gain(self) -> Tensor:
        """Bound [S, I] on |∂s'/∂x|, where there is a proof."""
        assert self.dynamics is not None
        return self.dynamics.gain

    @property
    def gauges(self) -> tuple[Gauge, ...]:
        """The norms of all proofs, those of the best proof first."""
        if self.dynamics is None:
            return ()
        return tuple(g for c in self.certificates for g in c.gauges())

    @property
    def best(self) -> Certificate | None:
        """The certificate with the smallest depth at ε = 1e-3."""
        return self.certificates[0] if self.certificates else None

    def depth(
        self,
        eps: float,
        readout: Readout | None = None,
        norm: Norm = "max",
        radius: float | None = None,
    ) -> int | None:
        """Return the smallest depth that any certificate proves (see ``Certificate.depth``)."""
        depths = [c.depth(eps, readout, norm, radius) for c in self.certificates]
        return min((k for k in depths if k is not None), default=None)


@dataclass(slots=True, eq=False)
class Search:
    """How long a search may take, and where its proofs and failures are collected."""

    seed: int = 0
    deadline: float | None = None
    progress: Callable[[float], None] | None = None
    certificates: list[Certificate] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)
    dynamics: Dynamics | None = None

    @property
    def expired(self) -> bool:
        """Whether the time is up."""
        return self.deadline is not None and time.monotonic() > self.deadline

    def fail(self, method: str, reason: str) -> None:
        """Note why a method proves nothing."""
        self.failures.append((method, reason))

    @contextmanager
    def attempt(self, method: str) -> Iterator[None]:
        """Try a method that proves nothing where its numerics break down."""
        try:
            yield
        except (torch.linalg.LinAlgError, OverflowError):  # type: ignore[attr-defined]
            self.fail(method, "its search broke down in float64")


@singledispatch
def prove(cell: Cell, recurrence: Recurrence, domain: Domain, search: Search) -> None:
    """Try every method that applies to this kind of cell; collect what they prove in ``search``.

    The failure that explains most comes first.
    """
    search.fail("every method", f"no method covers {cell.kind} cells")


def geometric_depth(rate: float, first: float, later: float, eps: float) -> int | None:
    """Return the smallest k with ``first`` ≤ ε at k = 0, or ``later`` · rateᵏ ≤ ε at k ≥ 1.

    ``first`` is what holds before any step. The power is evaluated upward, one rounding
    at a time; None where that exceeds ε up to ``DEEPEST``.
    """
    if not (eps > 0 and math.isfinite(later)) or not 0 <= rate < 1:
        return None

    def holds(k: int) -> bool:
        # The product rounds once.
        return later * power_above(rate, k) * (1 + 2e-15) + _LOST <= eps

    depths = range(1, DEEPEST + 1)
    place = bisect_left(depths, True, key=holds)
    if place == len(depths):
        return None
    # Once it holds at some k ≥ 1 it holds at every later one; k = 0 needs both.
    return 0 if place == 0 and first <= eps else depths[place]


def power_above(rate: float, k: int) -> float:
    """Bound rateᵏ from above, for 0 ≤ rate < 1; at least 1e-300, so that underflow cannot tell."""
    # pow is within 4 ulp in every libm in use, where it does not underflow.
    return max(rate**k * (1 + 2e-15), _LOST)
