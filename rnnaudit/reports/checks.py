"""What can pass or fail in one outcome: the lines that reports for pipelines list."""

from __future__ import annotations

from rnnaudit.reports import numbers, wording
from rnnaudit.results import Equivalence, Report, Rule


def checks(report: Report) -> tuple[Rule, ...]:
    """Return the gate's rules and the comparison with the original; none where none was asked."""
    rules = report.gate.rules if report.gate is not None else ()
    judged = report.equivalence
    return rules if judged is None else (*rules, _comparison(judged))


def _comparison(judged: Equivalence) -> Rule:
    where = judged.where
    place = "" if where is None else f"output {where.output}, t = {where.t}, unit {where.unit}"
    return Rule(
        "equivalence",
        judged.passed,
        f"every output within ε = {numbers.epsilon(judged.eps)} of the original's",
        str(wording.judgement(judged)),
        place,
        _advice(judged),
        "RA304" if judged.max_abs_error is None else "RA303",
    )


def _advice(judged: Equivalence) -> str:
    if judged.required_eps is None:
        return "see why the run failed: nothing compared is never a pass"
    return f"take a larger depth, or --eps {numbers.exact(judged.required_eps)}, which would pass"


def sentence(rule: Rule) -> str:
    """Say in one line why a rule failed, and what to do."""
    where = f"{rule.where}: " if rule.where else ""
    next_ = f"; next: {rule.help}" if rule.help else ""
    return numbers.clean(f"{where}wanted {rule.wanted}; got {rule.got}{next_}")
