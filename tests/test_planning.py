"""Plans come in the order in which they deserve to be tried: a proof, then ever deeper ones."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from rnnaudit.depth import DepthStudy
from rnnaudit.errors import UnsupportedModelError
from rnnaudit.estimators.probes import KINDS
from rnnaudit.examine import Settings, examine
from rnnaudit.model import ElmanCell, Layer, Model, Stack
from rnnaudit.observe import observe
from rnnaudit.planning import Wanted, chosen, left_out, plans, set_aside, usable
from tests import strategies

pytestmark = pytest.mark.usefixtures("one_thread")


def examined(tmp_path, *, gain, eps=1e-3, length=64):
    cell = strategies.random_cell(0, "elman", hidden=4, inputs=2)
    W = gain * torch.linalg.qr(cell.W).Q
    r = strategies.recurrence(ElmanCell(W, cell.U, cell.b))
    layer = Layer((r,))
    model = Model(tmp_path / "made.pt", "made", "", (Stack("rnn", (layer,)),), whole=True)
    seen = observe(model, None, seed=0, sequences=8, length=length)
    return examine(model, seen, Settings(eps=eps))


def test_a_proof_is_the_only_plan_where_it_gives_a_depth(tmp_path):
    found = examined(tmp_path, gain=0.5)
    candidates, kept = plans(found, Wanted(1e-3, 512))
    (only,) = candidates
    assert kept == ()
    assert only.evidence == "proved"
    assert only.depths == found.stacks[0].certificate.layerwise(1e-3)


def test_measured_plans_grow_deeper_and_stay_within_the_limit(tmp_path):
    found = examined(tmp_path, gain=0.5)
    candidates, _ = plans(found, Wanted(1e-3, 512, "measured"))
    tried = list(candidates)
    depths = [p.depths["rnn[0]"] for p in tried]
    assert {p.evidence for p in tried} == {"synthetic"}
    assert all(a < b for a, b in pairwise(depths))
    # The first keeps ε/2 on every sequence measured.
    assert depths[0] >= found.recurrences["rnn[0]"].depth(5e-4, found.settings).measured.k
    shallow, _ = plans(found, Wanted(1e-3, depths[0], "measured"))
    assert [p.depths["rnn[0]"] for p in shallow] == depths[:1]


def test_a_refusal_says_what_was_wanted_and_what_stands_against_it(tmp_path):
    found = examined(tmp_path, gain=3.0)
    with pytest.raises(UnsupportedModelError, match="no proof of a depth of at most 9") as refused:
        plans(found, Wanted(1e-3, 9, "proved"))
    assert refused.value.id == "RA302"
    with pytest.raises(
        UnsupportedModelError, match=r"got none: rnn\[0\]: it (needs|remembers longer)"
    ):
        plans(found, Wanted(1e-3, 1, "measured"))


def test_what_cannot_be_cut_sets_nothing_aside_and_says_why(tmp_path):
    found = examined(tmp_path, gain=0.5)
    wanted = Wanted(1e-3, 512, obstacles={"rnn[0]": "its Loop is odd"})
    assert set_aside(found, wanted, synthetic=True) == ()
    with pytest.raises(UnsupportedModelError, match=r"rnn\[0\]: its Loop is odd"):
        plans(found, wanted)


def test_a_chosen_depth_is_taken_whatever_the_evidence(tmp_path):
    made = chosen(examined(tmp_path, gain=3.0), 7, Wanted(1e-3, 1))
    assert made.depths == {"rnn[0]": 7}
    assert made.evidence == "chosen"


def study(held, sequences=10, steps=40):
    """Errors of 1 at every depth for the kinds that are held, and of 0 from depth 3 for others."""
    errors = torch.zeros(sequences, steps, dtype=torch.float64)
    for n in range(sequences):
        errors[n, : steps if KINDS[n % 5] in held else 3] = 1.0
    lengths = (steps,) * sequences
    return DepthStudy(errors, tuple(range(steps)), lengths, lengths)


@pytest.mark.parametrize(
    ("held", "out"),
    [((), ()), (("constant",), ("constant",)), (KINDS[2:], KINDS[2:]), (KINDS, ())],
)
def test_kinds_of_input_that_are_held_are_left_out_unless_all_are(held, out):
    cell = strategies.random_cell(0, "elman")
    stack = Stack("rnn", (Layer((strategies.recurrence(cell),)),))
    each = {"rnn[0]": SimpleNamespace(study=study(held))}
    found = SimpleNamespace(recurrences=each, settings=Settings(eps=0.5))
    whole = SimpleNamespace(stack=stack, kinds=KINDS * 2, study=study(held))
    assert left_out(found, whole, 0.5) == out
    rows = usable(found, whole, 0.5)
    assert {KINDS[n % 5] for n in rows} == set(KINDS) - set(out)
