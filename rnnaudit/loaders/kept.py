"""What a TorchScript module keeps from one call to the next, told from its code as text.

The code is what the compiler printed: one operation a line, attributes read into names of
their own. A tensor is kept if a method reads it before it sets it, or if one method sets it
and another reads it. Names are followed through attributes of attributes and in-place
operators on views; nothing is run, and no line is longer than a given length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

LONGEST_LINE = 4096

_METHOD = re.compile(r"^ {2}def (\w{1,200})\((\w{1,200})\b")
_ALIAS = re.compile(r"^ *(\w{1,200}) = ((?:\w{1,200}\.){0,8}\w{1,200})$")
_VIEW = re.compile(r"^ *(\w{1,200}) = torch\.(?:slice|select|view|narrow|unsqueeze)\((\w{1,200})\b")
_SET = re.compile(r"^ *((?:\w{1,200}\.){1,8})(\w{1,200}) = ")
_IN_PLACE = re.compile(
    r"\btorch\.(?P<op>\w{1,60}_|_set_item)\((?:torch\.\w{1,60}\(){0,8}(?P<on>\w{1,200}(?:\.\w{1,200}){0,8})"
)
_OUT = re.compile(r"\bout=(\w{1,200}(?:\.\w{1,200}){0,8})")
_NAME = re.compile(r"(?<![\w.\"'])[A-Za-z_]\w{0,200}(?:\.\w{1,200}){0,8}")
_OVERWRITES = frozenset({"copy_", "set_", "fill_", "zero_", "_set_item"})

Place = tuple[str, str]
"""Where a module is, and the name of its attribute."""

Module = tuple[str, Mapping[str, object]]
"""Where a module is, and its attributes."""


def kept(text: str, module: Module, kind: type) -> Iterator[Place]:
    """Yield the attributes that a class keeps between calls, of its own and of its parts.

    Args:
        text: The code of the class.
        module: Where an object of it is, and its attributes.
        kind: The type of those attributes that are modules.
    """
    methods = []
    for first, *lines in _methods(text):
        match = _METHOD.match(first)
        assert match is not None
        methods.append(_Method({match[2]: module}, kind))
        for line in lines:
            methods[-1].follow(line)
    found: dict[Place, None] = {}
    for method in methods:
        others = {place for other in methods if other is not method for place in other.read}
        found |= {place: None for place in method.changed if place in method.read | others}
    yield from found


def _methods(text: str) -> Iterator[list[str]]:
    """Yield the lines of each method, its first."""
    lines: list[str] = []
    for line in text.splitlines():
        if _METHOD.match(line):
            if lines:
                yield lines
            lines = [line]
        elif lines and len(line) <= LONGEST_LINE:
            lines.append(line)
    if lines:
        yield lines


@dataclass(slots=True)
class _Method:
    """What names stand for in a method, what it changes, and what it reads before that."""

    modules: dict[str, Module]
    kind: type
    places: dict[str, Place] = field(default_factory=dict)
    changed: dict[Place, None] = field(default_factory=dict)
    read: set[Place] = field(default_factory=set)

    def follow(self, line: str) -> None:
        """Take in one line."""
        if self._named(line):
            return  # reading into a name is no use yet
        written: list[Place] = []
        targets: set[int] = set()
        if (assigned := _SET.match(line)) is not None:
            written += self._place(assigned[1] + assigned[2])
            targets.add(assigned.start(1))
        for match in _IN_PLACE.finditer(line):
            written += self._place(match["on"])
            if match["op"] in _OVERWRITES:
                targets.add(match.start("on"))
        for match in _OUT.finditer(line):
            written += self._place(match[1])
            targets.add(match.start(1))
        for name in _NAME.finditer(line):
            if name.start() not in targets:
                self.read |= {p for p in self._place(name[0]) if p not in self.changed}
        self.changed |= dict.fromkeys(written)

    def _named(self, line: str) -> bool:
        """Whether a line gives a name to an attribute, or to a view of one."""
        if (view := _VIEW.match(line)) is not None and view[2] in self.places:
            self.places[view[1]] = self.places[view[2]]
            return True
        alias = _ALIAS.match(line)
        if alias is None:
            return False
        place, module = self._place(alias[2]), self._module(alias[2])
        self.places.pop(alias[1], None)
        self.modules.pop(alias[1], None)
        if module is not None:
            self.modules[alias[1]] = module
        elif place:
            self.places[alias[1]] = place[0]
        return module is not None or bool(place)

    def _module(self, path: str) -> Module | None:
        first, *rest = path.split(".")
        at = self.modules.get(first)
        for name in rest:
            value = None if at is None else at[1].get(name)
            if at is None or not isinstance(value, self.kind) or not isinstance(value, Mapping):
                return None
            at = f"{at[0]}.{name}".lstrip("."), value
        return at

    def _place(self, path: str) -> list[Place]:
        """Return the attribute that a name or a path stands for, if it stands for one."""
        if path in self.places:
            return [self.places[path]]
        front, _, name = path.rpartition(".")
        owner = self._module(front) if front else None
        if owner is None or self._module(path) is not None:
            return []
        return [(owner[0], name)]
