"""What a model must keep to, and which findings are accepted for a time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import Literal

from rnnaudit.results import Finding, Severity

Require = Literal["stable", "not-unstable", "any"]

Weakest = Literal["proved", "measured", "any"]
"""The weakest evidence that a depth may rest on: a proof, the user's data, any inputs."""

FailOn = Severity | Literal["never"]


@dataclass(frozen=True, slots=True)
class Allowance:
    """A finding that is accepted up to and including a day, and why."""

    id: str
    until: date
    reason: str

    def holds(self, today: date) -> bool:
        """Whether the day has not passed."""
        return today <= self.until


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a model must keep to; as it stands, that all of it is proved stable.

    Attributes:
        require: The verdict that is wanted.
        max_lambda: Largest λ that may be proved; every recurrence must have a proof.
        max_lambda_found: Largest ‖J‖ that may be found at any sampled state.
        max_depth: Largest k(ε) of the whole model, on ``evidence`` or stronger.
        evidence: The weakest evidence that a depth may rest on.
        max_exceed: Largest share of sequences that may exceed ε at the measured depth.
        fail_on: Findings of this severity or worse fail.
        allow_skipped: Parts that could not be audited do not fail.
        allow: Findings that are accepted.
        tolerance: Share by which λ and k may grow beyond a baseline.
    """

    require: Require = "stable"
    max_lambda: float | None = None
    max_lambda_found: float | None = None
    max_depth: int | None = None
    evidence: Weakest = "proved"
    max_exceed: float | None = None
    fail_on: FailOn = "error"
    allow_skipped: bool = False
    allow: tuple[Allowance, ...] = ()
    tolerance: float = 0.05

    def allowance(self, finding: Finding) -> Allowance | None:
        """Return the allowance of a finding that lasts longest."""
        matching = [a for a in self.allow if a.id == finding.id]
        return max(matching, key=lambda a: a.until, default=None)
