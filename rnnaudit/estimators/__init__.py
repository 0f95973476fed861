"""Numbers found by sampling: each errs on the side that its name says, and none can prove."""

from rnnaudit.estimators.probes import synthetic

__all__ = ["synthetic"]
