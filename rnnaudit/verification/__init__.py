"""Running two models on the same inputs, and, apart from that, judging what came out."""

from rnnaudit.verification.judge import Judgement, Tried, judge
from rnnaudit.verification.verify import verify

__all__ = ["Judgement", "Tried", "judge", "verify"]
