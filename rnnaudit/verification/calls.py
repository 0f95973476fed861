"""Models that are called step by step: what is cut up, what is carried, what is compared.

A truncated model says in its metadata that it takes new steps behind a buffer of its past, or
that it gives the last step of a sequence where the original takes one step per call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rnnaudit.model import Model
from rnnaudit.runtime import Calls, Interface, Port
from rnnaudit.verification.inputs import Feed, numpy_dtype
from rnnaudit.verification.slots import Roles, Slot
from rnnaudit.verification.states import carried

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Manner:
    """How a candidate is called, by what it says of itself.

    Attributes:
        past: The output behind each buffer that it takes.
        last_step_of: Time axis of each input of which the original takes one step.
        extra: Outputs that the original does not have.
        dropped: Outputs of the original that hold states it does not carry.
    """

    past: Mapping[str, str] = field(default_factory=dict)
    last_step_of: Mapping[str, int] = field(default_factory=dict)
    extra: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()

    @classmethod
    def of(cls, interface: Interface) -> Manner:
        """Read a candidate's metadata."""
        stored = interface.metadata
        past = _mapping(stored.get("rnnaudit.past"))
        guard = stored.get("rnnaudit.guard")
        return cls(
            {str(a): str(b) for a, b in past.items()},
            {str(a): int(b) for a, b in _mapping(stored.get("rnnaudit.last_step_of")).items()},
            (*map(str, past.values()), *([guard] if guard else [])),
            tuple(map(str, _read(stored.get("rnnaudit.dropped"), list))),
        )

    def bare(self, interface: Interface) -> Interface:
        """Return the interface without buffers and the guard."""
        return replace(
            interface,
            inputs=tuple(p for p in interface.inputs if p.name not in self.past),
            outputs=tuple(p for p in interface.outputs if p.name not in self.extra),
        )


def _read(text: str | None, kind: type) -> Any:
    try:
        found = json.loads(text or "null")
    except ValueError:
        found = None
    return found if isinstance(found, kind) else kind()


def _mapping(text: str | None) -> Mapping[str, Any]:
    found: Mapping[str, Any] = _read(text, dict)
    return found


def by_step(model: Model, slots: Sequence[Slot]) -> Mapping[str, str]:
    """Return what an original that takes one step per call carries; nothing of any other."""
    one = any(slot.traced and slot.fixed("time") == 1 for slot in slots)
    states = carried(model)
    # Where no recurrence tells the axis of time, a graph without a free one takes one step.
    rest = [slot for slot in slots if slot.name not in states]
    closed = all(slot.fixed("time") is not None for slot in rest if "time" in slot.roles)
    untraced = closed and not any(slot.traced for slot in slots)
    return states if one or untraced else {}


def stepped(slot: Slot, states: Mapping[str, str]) -> Slot:
    """Give an input of one step a first axis of calls; states start from zero."""
    if slot.name in states:
        return replace(slot, fill="zeros", main=False, traced=False)
    if slot.fill not in ("values", "tokens"):
        return slot
    roles: Roles = ("time", *(None if role == "time" else role for role in slot.roles))
    return replace(slot, roles=roles, sizes=(None, *slot.sizes), traced=True)


def in_steps(slots: Sequence[Slot], states: Mapping[str, str], *, last: bool) -> Calls:
    """Return how an original of one step per call is given a sequence."""
    axes = {slot.name: 0 for slot in slots if slot.traced}
    return Calls(axes, states, single=True, give="last" if last else "stack")


def in_blocks(slots: Sequence[Slot], manner: Manner) -> Calls | None:
    """Return how a candidate with buffers is given a sequence: in blocks of new steps."""
    if not manner.past:
        return None
    axes = {slot.name: slot.roles.index("time") for slot in slots if "time" in slot.roles}
    return Calls(axes, manner.past, single=False, give="join")


def at_once(values: Array, axis: int) -> Array:
    """Bring inputs [T, …] of one step each to one input with T steps along ``axis``."""
    return np.concatenate(list(values), axis=axis)


def over_calls(values: Array, axis: int) -> Array:
    """Bring what a layer read at each call, [T, …], to the steps it read, [T, N, I] or [N, T, I].

    A layer that runs over another axis than that of the calls reads more than one step at
    each; every call is then one more row of its batch.
    """
    if values.shape[1 + axis] == 1:
        return at_once(values, axis)
    return np.concatenate(list(values), axis=1 - axis)


def buffers(
    ports: Sequence[Port],
    past: Mapping[str, str],
    feed: Feed,
    given: Mapping[str, Array],
    steps: Mapping[str, int] | None = None,
) -> Mapping[str, Array]:
    """Return buffers of zeros, without steps unless ``steps`` tells how many by name.

    Their batch is known by number, or by the name of an axis of another input.
    """
    sizes: dict[object, int] = {}
    for port in ports:
        if port.name in given and port.shape:
            shape = given[port.name].shape[-len(port.shape) :]
            sizes |= {d: n for d, n in zip(port.shape, shape, strict=True) if isinstance(d, str)}
    return {
        port.name: np.zeros(
            [
                (steps or {}).get(port.name, 0),
                *(d if isinstance(d, int) else sizes.get(d, feed.tried.batch) for d in shape[1:]),
            ],
            numpy_dtype(port.dtype),
        )
        for port in ports
        if port.name in past and (shape := port.shape) is not None
    }
