"""What an audit found, as frozen records of plain numbers.

Which side of the truth a number errs on is in its type: an ``UpperBound`` is a
proof, a ``LowerBound`` was found by sampling, and neither can stand for the other.
A number that does not exist is ``None``, never NaN or infinity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["stable", "unstable", "undecided"]
Severity = Literal["error", "warning", "note"]
Evidence = Literal["proved", "measured", "synthetic", "chosen"]

Norm = Literal["max", "2"]
"""Of an error over the output units of one position: the largest |Δ|, or ‖Δ‖₂."""

EPSILONS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
"""Every ε that a report's table has."""

BY_CHOICE = "left out by --layer"
"""Why a part was skipped that the user did not choose."""

ARRAYS = "arrays"
"""What the data are called that came from memory."""

LIVE = "nn.Module"
"""The format of a model that is in memory, or that code made."""

UNROLLED = "unrolled to "
"""How the finding begins of a recurrence that has no node of its own (RA126)."""

MAX_DEPTH = 512
"""The largest depth that ``truncate`` takes unless told otherwise."""

HORIZON = 256
"""The largest depth that a search for counterexamples looks at; only where it got as far, and
refuted that too, is a model called unstable."""


@dataclass(frozen=True, slots=True)
class UpperBound:
    """A proven bound: no state in the domain exceeds ``value``, in the named norm."""

    value: float
    norm: str
    method: str
    domain: str


@dataclass(frozen=True, slots=True)
class LowerBound:
    """The largest value found by sampling: the truth is at least ``value``."""

    value: float
    norm: str
    method: str
    witness: str | None = None


@dataclass(frozen=True, slots=True)
class NoProof:
    """Why no certificate was found, in one line."""

    reason: str


@dataclass(frozen=True, slots=True)
class NormCurve:
    """Largest ``‖J_r … J_1‖₂`` found over the sampled trajectories, for each r (a lower bound)."""

    r: tuple[int, ...]
    value: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LyapunovExponent:
    """Largest Lyapunov exponent, in nats per step, with its standard error."""

    max: float
    stderr: float
    steps: int

    @property
    def half_life(self) -> float | None:
        """Steps in which a perturbation halves, ``ln 2 / (−Λ₁)``; None where it does not."""
        return math.log(2) / -self.max if self.max < 0 else None


@dataclass(frozen=True, slots=True)
class LyapunovSpectrum:
    """The largest Lyapunov exponents, in nats per step and descending, with standard errors.

    An exponent is None where tangents vanish exactly (its exponent is −∞).
    """

    values: tuple[float | None, ...]
    stderrs: tuple[float | None, ...]
    steps: int

    @property
    def largest(self) -> LyapunovExponent | None:
        """The first exponent; None where it is −∞."""
        value, stderr = self.values[0], self.stderrs[0]
        if value is None or stderr is None:
            return None
        return LyapunovExponent(value, stderr, self.steps)


@dataclass(frozen=True, slots=True)
class UnitMemory:
    """k(ε) of each unit of the state on the data: where the memory sits.

    ``units`` holds the depths by part of the state (``h``, and ``c`` of an LSTM), None for
    a unit that remembers longer than the data show. ε is taken of the unit itself.
    """

    eps: float
    units: Mapping[str, tuple[int | None, ...]]

    def longest(self, count: int) -> tuple[tuple[str, int | None], ...]:
        """Return the names (``c[17]``) and depths of the units that remember longest."""
        named = [(f"{part}[{i}]", k) for part, ks in self.units.items() for i, k in enumerate(ks)]
        order = sorted(named, key=lambda unit: math.inf if unit[1] is None else unit[1])
        return tuple(order[::-1][:count])


@dataclass(frozen=True, slots=True)
class Eigenvalues:
    """Eigenvalues (real, imaginary) of ∂s'/∂s at ``states`` states that the inputs reach."""

    values: tuple[tuple[float, float], ...]
    states: int


@dataclass(frozen=True, slots=True)
class GateSeries:
    """A gate's activations at steps 1, 2, … of one sequence: quantiles over its units."""

    name: str
    p5: tuple[float, ...]
    p25: tuple[float, ...]
    p50: tuple[float, ...]
    p75: tuple[float, ...]
    p95: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Pictures:
    """What is computed for charts only; None or empty where there is nothing to draw."""

    eigenvalues: Eigenvalues | None
    gates: tuple[GateSeries, ...]


@dataclass(frozen=True, slots=True)
class MeasuredDepth:
    """Truncation depth on data: ``k``, or ``longer_than`` where the data end first.

    At ``confidence``, at most ``exceed_probability`` of such sequences err by more
    than ε at depth k (Clopper & Pearson, 1934). ``set_aside`` of those measured were allowed
    to need more than k, a number fixed before looking.
    """

    k: int | None
    longer_than: int | None
    sequences: int
    exceed_probability: float | None
    confidence: float
    synthetic: bool
    set_aside: int = 0


@dataclass(frozen=True, slots=True)
class Depth:
    """Truncation depths for one ε by kind of evidence; None where the kind is silent.

    ``refuted_in`` names the recurrence or the stack whose own output a witness was found for,
    and ``searched`` is the largest depth that the search for it looked at. Depths are of exact
    arithmetic; ``float32_noise`` is how far float32 alone takes the outputs on the inputs seen.
    """

    eps: float
    proved: int | None = None
    measured: MeasuredDepth | None = None
    refuted_below: int | None = None
    refuted_in: str | None = None
    searched: int | None = None
    float32_noise: float | None = None

    @property
    def below_noise(self) -> bool:
        """Whether ε is less than what float32 alone changes."""
        return self.float32_noise is not None and self.eps < self.float32_noise

    @property
    def exhausted(self) -> bool:
        """Whether a witness refutes every depth that the search looked at."""
        return self.searched is not None and (self.refuted_below or 0) > self.searched

    @property
    def never_forgets(self) -> bool:
        """Whether it does, and the search looked at all depths that decide a verdict."""
        return self.exhausted and (self.searched or 0) >= HORIZON


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Quantiles over sequences of the largest error at depth ``k``."""

    k: int
    p50: float
    p95: float
    max: float


@dataclass(frozen=True, slots=True)
class Skipped:
    """A part that was not audited, and why."""

    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact worth acting on, with an identity (``RA…``) that never changes meaning."""

    id: str
    severity: Severity
    where: str
    message: str
    help: str = ""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A method of proof beside the best one: its rate and depth for ε, or why it has none."""

    method: str
    rate: float | None
    norm: str
    k: int | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RecurrenceReport:
    """What is known of one recurrence (one direction of one layer)."""

    name: str
    cell: str
    input_size: int
    hidden_size: int
    direction: Literal["forward", "reverse"]
    layer: int
    verdict: Verdict
    cell_options: Mapping[str, object]
    upper: UpperBound | None
    no_proof: NoProof | None
    lower: LowerBound | None
    norms: NormCurve | None
    lyapunov: LyapunovExponent | None
    depths: tuple[Depth, ...]
    curve: tuple[CurvePoint, ...] = ()
    spectral_norm: float | None = None
    initial_state: str = "zero"
    others: tuple[Attempt, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    spectrum: LyapunovSpectrum | None = None
    unit_memory: UnitMemory | None = None
    pictures: Pictures | None = None

    @property
    def label(self) -> str:
        """The name that is unique in the model: stack, layer and direction."""
        return f"{self.name}[{self.layer}]{' reverse' if self.direction == 'reverse' else ''}"


@dataclass(frozen=True, slots=True)
class Location:
    """Where the largest error sits: which input, batch row, time step and output unit."""

    input: str
    output: str
    batch: int
    t: int
    unit: int


@dataclass(frozen=True, slots=True)
class Equivalence:
    """Two models run on the same inputs, judged with AND semantics and rtol = 0.

    ``left_out`` says which inputs were not compared, and why. ``known_error`` is how far the
    candidate errs on an input that a search found, by its own account; None where none errs by
    more than ``eps``.
    """

    passed: bool
    eps: float
    max_abs_error: float | None
    required_eps: float | None
    where: Location | None
    percentiles: Mapping[str, float]
    inputs_tried: int
    truncation_error: float | None
    conversion_error: float | None
    reference: str = ""
    seconds: float | None = None
    reason: str = ""
    left_out: tuple[str, ...] = ()
    known_error: float | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """A saved witness run again: the distance of the two runs at each depth, then and now.

    ``depths`` ends with the deepest that the witness refutes; where a model gives its last
    output only, it holds no other. ``same_weights`` says that the model is the one in which
    the witness was found, ``both_ways`` that each depth cuts the recurrences of a stack that
    also reads the future. ``rounding`` is how much of the deepest distance float64 does not show
    again: 0 where that alone is more than ``eps``.
    """

    where: str
    eps: float
    norm: Norm
    depths: tuple[int, ...]
    found: tuple[float, ...]
    replayed: tuple[float, ...]
    runtime: str
    domain: str
    same_weights: bool
    both_ways: bool = False
    rounding: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the deepest depth is refuted again."""
        return self.refutes(self.replayed[-1])

    def refutes(self, gap: float) -> bool:
        """Whether a replayed distance is more than ε, and more than rounding."""
        return gap > self.eps + self.rounding

    @property
    def refuted_below(self) -> int | None:
        """The depth below which no k holds, as replayed; None where none is refuted."""
        wrong = [k for k, gap in zip(self.depths, self.replayed, strict=True) if self.refutes(gap)]
        return max(wrong) + 1 if wrong else None


@dataclass(frozen=True, slots=True)
class Truncation:
    """One recurrence cut to ``depth`` steps, with the evidence that chose it."""

    recurrence: str
    depth: int
    evidence: Evidence


@dataclass(frozen=True, slots=True)
class Export:
    """The truncated model that was written."""

    path: str
    form: str
    truncations: tuple[Truncation, ...]
    opset: int
    bytes_before: int | None
    bytes_after: int
    milliseconds_before: float | None
    milliseconds_after: float | None
    latency_shape: str
    inputs: tuple[tuple[str, tuple[int | str, ...], str], ...]
    outputs: tuple[str, ...]
    initial_state: str = "zero"
    form_reason: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a policy, judged: what was wanted, what came, where, and what to do next.

    ``id`` is the identity of the finding that a failure of this rule is.
    """

    rule: str
    passed: bool
    wanted: str
    got: str
    where: str = ""
    help: str = ""
    id: str = ""


@dataclass(frozen=True, slots=True)
class Gate:
    """A policy judged on one report: it passes where every rule does."""

    rules: tuple[Rule, ...]

    @property
    def passed(self) -> bool:
        """Whether every rule holds."""
        return all(rule.passed for rule in self.rules)

    @property
    def failures(self) -> tuple[Rule, ...]:
        """The rules that do not hold."""
        return tuple(rule for rule in self.rules if not rule.passed)


@dataclass(frozen=True, slots=True)
class ProofFile:
    """A file of proofs: ``valid`` where an independent program proved all of it again."""

    path: str
    bytes: int
    valid: bool
    refused: tuple[Skipped, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The audited file."""

    path: str
    format: str
    sha256: str


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """One audit: everything that a renderer, a policy or a user may read.

    ``print`` shows what the command line would.
    """

    model: ModelInfo
    settings: Mapping[str, object]
    verdict: Verdict
    recurrences: tuple[RecurrenceReport, ...]
    eps: float
    norm: Norm
    depth: Depth
    table: tuple[Depth, ...]
    scope: str
    domain: str
    data: str
    tool: Mapping[str, str | None] = field(default_factory=dict)
    skipped: tuple[Skipped, ...] = ()
    findings: tuple[Finding, ...] = ()
    equivalence: Equivalence | None = None
    export: Export | None = None
    replay: Replay | None = None
    gate: Gate | None = None
    proof_file: ProofFile | None = None

    def __str__(self) -> str:
        """Return the report as text, no line wider than 80 columns."""
        return _SHOWN[-1](self)

    def __repr__(self) -> str:
        """Return what decides, and how much else there is, on one line."""
        measured = None if self.depth.measured is None else self.depth.measured.k
        facts = {
            "model": self.model.path,
            "verdict": self.verdict,
            "recurrences": len(self.recurrences),
            "eps": self.eps,
            "proved": self.depth.proved,
            "measured": measured,
            "refuted_below": self.depth.refuted_below,
        }
        if self.equivalence is not None:
            facts |= {
                "passed": self.equivalence.passed,
                "max_abs_error": self.equivalence.max_abs_error,
            }
        if self.export is not None:
            facts["written"] = self.export.path
        facts |= {
            "skipped": len(self.skipped),
            "findings": tuple(dict.fromkeys(f.id for f in self.findings)),
        }
        return f"Report({', '.join(f'{name}={value!r}' for name, value in facts.items())})"


_SHOWN: list[Callable[[Report], str]] = [repr]


def shown_by(render: Callable[[Report], str]) -> None:
    """Let ``str(report)`` be what a renderer makes of it; those live in the rooms above."""
    _SHOWN[:] = [render]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A file that could not be audited, and why."""

    path: str
    id: str
    message: str
    help: str = ""


Outcome = Report | Refusal
"""What came of one file of several."""
