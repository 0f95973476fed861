"""Numbers found by sampling: each errs on the side that its name says, and none can prove."""

from rnnaudit.estimators.adversary import PREFIX, Recording, Refutation, Witness, refute, witness
from rnnaudit.estimators.both_ways import recording, refute_both_ways, within_reach
from rnnaudit.estimators.lyapunov import lyapunov, spectrum
from rnnaudit.estimators.obstacles import Bistability, Obstacles, obstacles
from rnnaudit.estimators.pictures import pictures
from rnnaudit.estimators.power_iteration import lambda_below, norm_below, spectral_norms
from rnnaudit.estimators.probes import is_one_hot, synthetic, synthetic_within
from rnnaudit.estimators.products import longest, norm_curve
from rnnaudit.estimators.states import sample

__all__ = [
    "PREFIX",
    "Bistability",
    "Obstacles",
    "Recording",
    "Refutation",
    "Witness",
    "is_one_hot",
    "lambda_below",
    "longest",
    "lyapunov",
    "norm_below",
    "norm_curve",
    "obstacles",
    "pictures",
    "recording",
    "refute",
    "refute_both_ways",
    "sample",
    "spectral_norms",
    "spectrum",
    "synthetic",
    "synthetic_within",
    "within_reach",
    "witness",
]
