"""Traced steps that are exactly LSTMs, GRUs or Elman cells, told by their algebra.

The next state, products multiplied out, is f c + i g beside o tanh(c'), or n − z n + z h, or
φ(a), whatever operators wrote it; the arguments of the activations must be affine in the
input and the cell's own state, and may all be clipped alike. An LSTM may have f = 1 − i, a
projection, and gates that read the cell state. A step may hold several cells, where one reads
what another gives. Nothing is told from names, and a form that is not matched is no answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rnnaudit.cells.algebra import (
    CLIP,
    Algebra,
    Atoms,
    Factor,
    Form,
    Polynomial,
    Unlike,
    polynomial,
)
from rnnaudit.cells.interface import drive, next_state
from rnnaudit.model import (
    SIGMOID,
    Activation,
    ElmanCell,
    GRUCell,
    LSTMCell,
    NamedCell,
    TracedCell,
)

AGREE = 1e-12
"""How far the cells' steps may be from the traced one's in float64; more would be our fault."""

_LINEAR = Activation("affine", 1.0, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A cell within a step: which numbers of the step's state are its own, in its own order.

    ``reads`` is the number of the part whose next output it reads, None for the step's input.
    ``rounded`` says that its bias is a sum which float64 rounds.
    """

    cell: NamedCell
    state: tuple[int, ...]
    reads: int | None
    rounded: bool


def recognise(cell: TracedCell) -> tuple[Part, ...] | None:
    """Return the cells that a traced step is made of, first the one that reads the input.

    None where it is not proved to be made of LSTMs, GRUs and Elman cells, which together
    hold each number of the state once.
    """
    try:
        parts = _Match(Algebra(cell)).parts()
    except (Unlike, ValueError, TypeError, IndexError, RuntimeError, KeyError):
        return None
    return parts if _agree(cell, parts) else None


def _agree(cell: TracedCell, parts: Sequence[Part]) -> bool:
    rng = torch.Generator().manual_seed(0)
    s, x = (
        torch.randn(16, n, generator=rng, dtype=torch.float64)
        for n in (cell.state_size, cell.input_size)
    )
    after = next_state(cell, s, x)
    for part in parts:
        given = x
        if part.reads is not None:
            source = parts[part.reads]
            given = after[:, list(source.state[: source.cell.hidden_size])]
        wanted = after[:, list(part.state)]
        found = next_state(part.cell, s[:, list(part.state)], drive(part.cell, given))
        if not bool((found - wanted).abs().max() <= AGREE * max(1.0, float(wanted.abs().max()))):
            return False
    return True


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Numbers of the state whose sequels are written alike: their places and their polynomial."""

    places: tuple[int, ...]
    after: Form
    terms: Polynomial


class _Match:
    """The parts of a step, one after another."""

    def __init__(self, algebra: Algebra) -> None:
        self.algebra = algebra
        self.outputs: list[Form] = []  # what the parts found so far give
        self.reads: int | None = None

    def parts(self) -> tuple[Part, ...]:
        """Match every group of the state's numbers.

        Raises:
            Unlike: One is left over.
        """
        left = self._groups()
        found: list[Part] = []
        while left:
            for group in left:
                part = self._part(group, left)
                if part is not None:
                    break
            else:
                raise Unlike
            taken = set(part.state)
            left = [g for g in left if not taken & set(g.places)]
            found.append(part)
            self.outputs.append(self.algebra.after.at(part.state[: part.cell.hidden_size]))
        return tuple(found)

    def _groups(self) -> list[_Group]:
        after = self.algebra.after
        blocks = [b for b in after.parts if b is not self.algebra.one]
        used = torch.stack([(after.parts[b] != 0).any(0) for b in blocks], dim=1).tolist()
        places: dict[tuple[bool, ...], list[int]] = {}
        for i, pattern in enumerate(used):
            places.setdefault(tuple(pattern), []).append(i)
        groups = []
        for where in places.values():
            form = after.at(where)
            groups.append(_Group(tuple(where), form, _terms(form)))
        return groups

    def _part(self, group: _Group, left: Sequence[_Group]) -> Part | None:
        """Match one group, reading the input or what an earlier part gives."""
        for reads in (None, *range(len(self.outputs))):
            self.reads = reads
            for match in (self._lstm, self._gru, self._elman):
                try:
                    cell, places = match(group, left)
                except Unlike:
                    continue
                return Part(cell, places, reads, self.algebra.rounded)
        return None

    # --- the three families -----------------------------------------------------------------

    def _lstm(self, c: _Group, left: Sequence[_Group]) -> tuple[NamedCell, tuple[int, ...]]:
        """Match c' = f c + i g, and the group whose sequel is o tanh(c') or its projection."""
        for h in left:
            try:
                projection, pair = _gated(h)
            except Unlike:
                continue
            for o, squashed in _orders(pair):
                for gates in _sums(c.terms, (self.algebra.state, c.places)):
                    try:
                        return self._gates(c, h, gates, (o, squashed), projection)
                    except Unlike:
                        continue
        raise Unlike

    def _gates(
        self,
        c: _Group,
        h: _Group,
        gates: _Sum,
        given: tuple[Factor, Factor],
        projection: Tensor | None,
    ) -> tuple[NamedCell, tuple[int, ...]]:
        """Make a cell of the gates of c', and of the two factors o and tanh(c') of h'."""
        (i, f, g), (o, squashed) = (gates.i, gates.f, gates.g), given
        if not _activated(i, g, o, squashed, *([] if f is None else [f])):
            raise Unlike
        if len({_function(a) for a in (i, f, o) if a is not None}) > 1:
            raise Unlike
        forms, clip = _unclipped([_argument(a) for a in (i, f, g, o) if a is not None])
        if gates.turned:
            if _function(i) != SIGMOID:
                raise Unlike
            forms[0] = Form(forms[0].shape, {b: -part for b, part in forms[0].parts.items()})
        if f is None:  # its rows are not read
            forms.insert(1, Form((len(c.places),), {}))
        inner, clip_output = _argument(squashed), False
        if _terms(inner) != c.terms:
            (inner,), bound = _unclipped([inner])
            clip_output = True
            if clip is None or bound != clip or _terms(inner) != c.terms:
                raise Unlike
        before = Form((len(c.places),), {self.algebra.state: self._own(c.places)})
        peepholes = []
        for at, read in ((0, before), (1, before), (3, c.after)):
            p, forms[at] = _peephole(forms[at], read)
            peepholes.append(p)
        peephole = torch.stack(peepholes)
        cell = LSTMCell(
            *_stacked([self._affine(form, h.places) for form in forms]),
            peephole=peephole if bool(peephole.any()) else None,
            projection=projection,
            input_forget=f is None,
            gate=_function(i),
            candidate=_function(g),
            squash=_function(squashed),
            clip=clip,
            clip_output=clip_output,
        )
        return cell, (*h.places, *c.places)

    def _own(self, places: Sequence[int]) -> Tensor:
        return _picked(self.algebra.state.size, places)

    def _gru(self, h: _Group, _: Sequence[_Group]) -> tuple[NamedCell, tuple[int, ...]]:
        """Match n − z n + z h, or h − z h + z n, where σ(−a) = 1 − σ(a) turns the gate."""
        n, z, turned = _blend(h.terms, (self.algebra.state, h.places))
        (inner,), clip = _unclipped([_argument(n)])
        new = self._candidate(inner, h.places)
        if not _activated(z, new.reset) or _function(z) != _function(new.reset):
            raise Unlike
        if turned and _function(z) != SIGMOID:
            raise Unlike
        forms, bound = _unclipped([_argument(gate) for gate in (new.reset, z)])
        if bound != clip:
            raise Unlike
        r, kept = (self._affine(form, h.places) for form in forms)
        W, U, b = _stacked([r, kept.negated() if turned else kept, new.affine])
        zeros = torch.zeros(2 * len(h.places), dtype=torch.float64)
        cell = GRUCell(
            W,
            U,
            b,
            torch.cat([zeros, new.inner]),
            reset_after=new.after,
            gate=_function(z),
            candidate=_function(n),
            clip=clip,
        )
        return cell, h.places

    def _elman(self, h: _Group, _: Sequence[_Group]) -> tuple[NamedCell, tuple[int, ...]]:
        """Match φ(a), or a itself."""
        activation, form = _LINEAR, h.after
        if len(h.terms) == 1 and len(next(iter(h.terms))) == 1:
            (only,) = _single(h.terms)
            if _activated(only):
                activation, form = _function(only), _argument(only)
        (form,), clip = _unclipped([form])
        a = self._affine(form, h.places)
        return ElmanCell(a.U, a.W, a.b, activation, clip), h.places

    def _candidate(self, form: Form, own: tuple[int, ...]) -> _Candidate:
        """Match W x + b + r (U h + c), or W x + b + U (r h)."""
        for block, part in form.parts.items():
            if block.kind != "product":
                continue
            rest = Form(form.shape, {b: p for b, p in form.parts.items() if b is not block})
            for match in (self._reset_after, self._reset_before):
                try:
                    return match(block, part, rest, own)
                except Unlike:
                    continue
        raise Unlike

    def _reset_after(
        self, block: Atoms, part: Tensor, rest: Form, own: tuple[int, ...]
    ) -> _Candidate:
        places = part.argmax(0)
        if not torch.equal(part, _picked(block.size, places.tolist())):
            raise Unlike
        factors = [form.at(places.tolist()) for form in block.of]
        for gate, inner in (factors, factors[::-1]):
            try:
                (r,) = _single(polynomial(gate))
                reset, outer = self._affine(inner, own), self._affine(rest, own)
            except (Unlike, ValueError):
                continue
            if not bool(reset.W.any()) and not bool(outer.U.any()):
                return _Candidate(_Affine(outer.W, reset.U, outer.b), reset.b, r, after=True)
        raise Unlike

    def _reset_before(
        self, block: Atoms, part: Tensor, rest: Form, own: tuple[int, ...]
    ) -> _Candidate:
        rows = part.any(1).nonzero().flatten().tolist()
        at = _state_places(polynomial(_atoms(block, rows)), self.algebra.state)
        if sorted(at) != sorted(own):
            raise Unlike
        rows = [rows[at.index(place)] for place in own]
        pair = _single(polynomial(_atoms(block, rows)))
        r = next(f for f in pair if f[0] is not self.algebra.state)
        outer = self._affine(rest, own)
        if bool(outer.U.any()):
            raise Unlike
        zeros = torch.zeros(len(own), dtype=torch.float64)
        return _Candidate(_Affine(outer.W, part[rows].T, outer.b), zeros, r, after=False)

    # --- affine arguments -------------------------------------------------------------------

    def _affine(self, form: Form, own: tuple[int, ...]) -> _Affine:
        """Split a form [n] into its own state's part, the input's part, and the bias."""
        one, state = self.algebra.one, self.algebra.state
        recurrent = form.of(state).clone()
        U = recurrent[list(own)].T
        recurrent[list(own)] = 0
        rest = {b: p for b, p in form.parts.items() if b not in (one, state)}
        W = self._read(Form(form.shape, {**rest, state: recurrent}))
        return _Affine(W.contiguous(), U.contiguous(), form.of(one)[0])

    def _read(self, rest: Form) -> Tensor:
        """Return W [n, I] of what remains of a form: W x, or W h' of the part that is read."""
        source = Form((self.algebra.input.size,), {self.algebra.input: _eye(self.algebra.input)})
        if self.reads is not None:
            source = self.outputs[self.reads]
        for block, part in source.parts.items():
            places, columns = part.abs().argmax(0), torch.arange(part.shape[1])
            signs = part[places, columns]
            if block is self.algebra.state or bool((signs.abs() != 1).any()):
                continue
            W = (rest.of(block)[places] * signs.unsqueeze(1)).T
            blocks = {*source.parts, *rest.parts}
            if all(torch.equal(rest.of(b), source.of(b) @ W.T) for b in blocks):
                return W
        raise Unlike


@dataclass(frozen=True, slots=True, eq=False)
class _Affine:
    """W x + U h + b, for n units."""

    W: Tensor
    U: Tensor
    b: Tensor

    def negated(self) -> _Affine:
        return _Affine(-self.W, -self.U, -self.b)


@dataclass(frozen=True, slots=True, eq=False)
class _Sum:
    """The gates of f c + i g; f is None where it is 1 − i, and ``turned`` has 1 − i for i."""

    i: Factor
    f: Factor | None
    g: Factor
    turned: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    """What a GRU's candidate is a function of, U and ``inner`` behind the reset gate."""

    affine: _Affine
    inner: Tensor
    reset: Factor
    after: bool


def _stacked(gates: Sequence[_Affine]) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.cat([gate.W for gate in gates]),
        torch.cat([gate.U for gate in gates]),
        torch.cat([gate.b for gate in gates]),
    )


def _terms(form: Form) -> Polynomial:
    """Return the polynomial that all units share, without terms where there is none."""
    try:
        return polynomial(form)
    except Unlike:
        return {}


def _single(terms: Polynomial) -> tuple[Factor, ...]:
    """Return the factors of what must be one product, with coefficient 1."""
    if list(terms.values()) != [1.0]:
        raise Unlike
    return next(iter(terms))


def _orders(pair: Sequence[Factor]) -> list[tuple[Factor, Factor]]:
    if len(pair) != 2:
        raise Unlike
    return [(pair[0], pair[1]), (pair[1], pair[0])]


def _sums(terms: Polynomial, own: Factor) -> Iterator[_Sum]:
    """Read gates off f c + i g, off c − i c + i g, and off g − f g + f c."""
    pairs: list[tuple[Factor, ...]] = [m for m in terms if len(m) == 2]
    kept, added = [m for m in pairs if own in m], [m for m in pairs if own not in m]
    if len(kept) != 1 or len(added) != 1:
        return
    f = kept[0][1 - kept[0].index(own)]
    signs = terms[added[0]], terms[kept[0]]
    for i, g in _orders(added[0]):
        if len(terms) == 2 and signs == (1.0, 1.0):
            yield _Sum(i, f, g)
        if len(terms) == 3 and i == f and signs == (1.0, -1.0) and terms.get((own,)) == 1:
            yield _Sum(i, None, g)
        if len(terms) == 3 and i == f and signs == (-1.0, 1.0) and terms.get((g,)) == 1:
            yield _Sum(i, None, g, turned=True)


def _gated(h: _Group) -> tuple[Tensor | None, tuple[Factor, ...]]:
    """Read o and tanh(c') off h' = o tanh(c'), or off h' = R (o tanh(c')) with its R [P, H]."""
    if h.terms:
        return None, _single(h.terms)
    blocks = [b for b, part in h.after.parts.items() if bool(part.any())]
    if len(blocks) != 1 or blocks[0].kind != "product":
        raise Unlike
    hidden = _atoms(blocks[0], range(blocks[0].size))
    return h.after.of(blocks[0]).T.contiguous(), _single(polynomial(hidden))


def _unclipped(forms: Sequence[Form]) -> tuple[list[Form], float | None]:
    """Take off the bound that all forms share, or that none has."""
    taken = [_bounded(form) for form in forms]
    bounds = {bound for _, bound in taken}
    if len(bounds) != 1:
        raise Unlike
    return [form for form, _ in taken], bounds.pop()


def _bounded(form: Form) -> tuple[Form, float | None]:
    """Return what a form bounds, and by how much; the form itself and None where it does not."""
    terms = list(_terms(form).items())
    if len(terms) == 1 and terms[0][1] == 1 and len(terms[0][0]) == 1:
        factor = terms[0][0][0]
        if factor[0].kind == "activation" and _function(factor).name == CLIP:
            return _argument(factor), _function(factor).alpha
    return form, None


def _peephole(form: Form, read: Form) -> tuple[Tensor, Form]:
    """Split p ⊙ c off a form [n], c being ``read``: p, and what is left."""
    blocks = sorted(read.parts, key=lambda block: block.kind != "product")
    places, columns = read.parts[blocks[0]].abs().argmax(0), torch.arange(form.shape[0])
    signs = read.parts[blocks[0]][places, columns]
    if bool((signs.abs() != 1).any()):
        raise Unlike
    p = form.of(blocks[0])[places, columns] * signs
    both = dict.fromkeys((*form.parts, *read.parts))
    left = {block: form.of(block) - p * read.of(block) for block in both}
    return p, Form(form.shape, {b: part for b, part in left.items() if bool(part.any())})


def _blend(terms: Polynomial, own: Factor) -> tuple[Factor, Factor, bool]:
    """Return n and z of n − z n + z h; of h − z h + z n too, and then True."""
    alone = [m for m, c in terms.items() if len(m) == 1 and c == 1]
    if len(terms) != 3 or len(alone) != 1:
        raise Unlike
    first = alone[0][0]
    losing = [m for m, c in terms.items() if len(m) == 2 and c == -1 and first in m]
    gaining = [m for m, c in terms.items() if len(m) == 2 and c == 1 and first not in m]
    if len(losing) != 1 or len(gaining) != 1:
        raise Unlike
    z = losing[0][1 - losing[0].index(first)]
    if z not in gaining[0]:
        raise Unlike
    second = gaining[0][1 - gaining[0].index(z)]
    if first == own and _activated(second, z):
        return second, z, True
    if second == own and _activated(first, z):
        return first, z, False
    raise Unlike


def _activated(*factors: Factor) -> bool:
    """Whether all are results of functions that a cell can have."""
    return all(b.kind == "activation" and _function((b, at)).name != CLIP for b, at in factors)


def _function(factor: Factor) -> Activation:
    activation = factor[0].activation
    assert activation is not None
    return activation


def _argument(factor: Factor) -> Form:
    """Return what an activation is applied to, unit by unit."""
    block, places = factor
    return block.of[0].at(places)


def _eye(block: Atoms) -> Tensor:
    return torch.eye(block.size, dtype=torch.float64)


def _picked(size: int, places: Sequence[int]) -> Tensor:
    return torch.eye(size, dtype=torch.float64)[:, list(places)]


def _atoms(block: Atoms, places: Sequence[int]) -> Form:
    return Form((len(places),), {block: _picked(block.size, places)})


def _state_places(terms: Polynomial, state: Atoms) -> tuple[int, ...]:
    """Return which numbers of the state are a factor of one product of two."""
    places = [at for block, at in _single(terms) if block is state]
    if len(places) != 1 or len(_single(terms)) != 2:
        raise Unlike
    return places[0]
