"""Walk an ONNX graph: read each recurrent node, and say of each other recurrence why not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import onnx_ir as ir

from rnnaudit.errors import UnsupportedModelError
from rnnaudit.findings import finding
from rnnaudit.loaders.interface import brief, listed
from rnnaudit.loaders.onnx.closed import closed
from rnnaudit.loaders.onnx.functions import inline
from rnnaudit.loaders.onnx.given import give, read_values
from rnnaudit.loaders.onnx.loops import LOOPS, read_loop
from rnnaudit.loaders.onnx.nodes import GATES, QUANTISED, Read, read
from rnnaudit.loaders.onnx.reading import read_graph
from rnnaudit.loaders.onnx.refusal import MALFORMED, Refused
from rnnaudit.loaders.onnx.stacks import assemble
from rnnaudit.loaders.onnx.steps import read_steps
from rnnaudit.loaders.onnx.unrolled import read_unrolled
from rnnaudit.loaders.onnx.values import Knowledge
from rnnaudit.loaders.onnx.wiring import Wiring
from rnnaudit.model import GRUCell, Model
from rnnaudit.results import Finding, Skipped

_STANDARD = {"", "ai.onnx"}
_KINDS = re.compile("LSTM|GRU|RNN")


class OnnxLoader:
    """ONNX models of opset 7 and later, with LSTM, GRU and RNN nodes."""

    name = "ONNX"

    def recognises(self, head: bytes, path: Path) -> bool:
        """Whether this is a protobuf that begins as ONNX models do, or claims to be one.

        The first field of a model is its IR version, a small number.
        """
        begins = len(head) > 2 and head[0] == 0x08 and 0 < head[1] < 0x40
        return begins or (path.suffix == ".onnx" and not head.startswith(b"PK\x03\x04"))

    def load(self, path: Path, sha256: str, weights: Path | None = None) -> Model:
        """Read every recurrence of the model; see ``Loader.load``.

        Nodes without a name of their own are given one in the graph that is returned, so
        that each ``Site`` names its node. ``weights`` is a file of values for graph inputs,
        which that graph then stores.
        """
        graph = read_graph(path)
        if weights is not None:
            give(graph, read_values(weights), weights)
        inlined = inline(graph)
        walk = _Walk(graph)
        walk.graph(graph.graph)
        walk.edges(graph.graph)
        if not walk.reads and not walk.skipped:
            raise UnsupportedModelError(
                f"no recurrence found in {path}: looked at {_census(graph)}",
                help="LSTM, GRU and RNN nodes are read",
                id="RA105",
            )
        assembled = assemble(walk.reads, graph.graph, walk.known)
        return Model(
            path=path,
            format=self.name,
            sha256=sha256,
            stacks=assembled.stacks,
            whole=assembled.whole and not walk.skipped,
            graph=graph,
            inlined=inlined,
            completed=weights is not None,
            dtype=walk.reads[0].dtype if walk.reads else "float32",
            skipped=tuple(walk.skipped),
            findings=(
                *(finding for r in walk.reads for finding in r.findings),
                *walk.findings,
                *assembled.findings,
            ),
            twins=assembled.twins,
        )


class _Walk:
    """What one pass over the graph finds, in the order in which it runs."""

    def __init__(self, model: ir.Model) -> None:
        """Start before the first node."""
        self.model = model
        self.opset = int(model.opset_imports.get("", model.opset_imports.get("ai.onnx", 1)))
        self.known = Knowledge()
        self.wiring = Wiring(self.known)
        self.reads: list[Read] = []
        self.skipped: list[Skipped] = []
        self.findings: list[Finding] = []
        self._names = Counter(node.name for node in _nodes([model.graph]) if node.name)

    def graph(self, graph: ir.Graph, scope: str = "") -> None:
        """Visit the nodes in order; those in a branch of If see what is known outside it.

        Bodies nest as deep as protobuf lets them, about 30 levels.
        """
        for node in graph:
            if node.op_type == "If" and node.domain in _STANDARD:
                for branch in ("then", "else"):
                    attribute = node.attributes.get(f"{branch}_branch")
                    if attribute is not None and attribute.type == ir.AttributeType.GRAPH:
                        self.graph(attribute.as_graph(), f"{_path(node, scope)}[{branch}]")
            elif _is_recurrent(node):
                self._recurrence(node, scope)
            elif node.op_type in LOOPS and node.domain in _STANDARD:
                self._loop(node, scope)
            else:
                self.known.visit(node)
                reason = self._reason(node)
                if reason:
                    self.skipped.append(Skipped(_path(node, scope), reason))

    def edges(self, graph: ir.Graph) -> None:
        """Read what no node shows: states between calls, and steps that are written out."""
        unrolled, left = read_unrolled(graph, self.wiring, self.opset)
        read = (*self.reads, *unrolled)
        starts = (r.initial for each in read for r in each.layer.recurrences)
        taken = {name for start in starts for name in start.inputs}
        found, skipped, findings = read_steps(graph, self.wiring, taken, self.opset)
        self.reads += [part for read in (*found, *unrolled) for part in closed(read)]
        self.skipped += [*skipped, *left]
        self.findings += findings

    def _recurrence(self, node: ir.Node, scope: str) -> None:
        node.name = self._unique(node)
        where = _path(node, scope)
        try:
            self.reads.append(read(node, self.wiring, where, scope, self.opset))
            self._convention(self.reads[-1])
        except Refused as refused:
            self.skipped.append(Skipped(where, f"{node.op_type}: {refused}"))
        except MALFORMED as error:
            self.skipped.append(Skipped(where, _broken(node, error)))

    def _convention(self, found: Read) -> None:
        """Say that a GRU which PyTorch exported does not compute what PyTorch's does."""
        cell = found.layer.recurrences[0].cell
        exported = self.model.producer_name == "pytorch"
        if exported and isinstance(cell, GRUCell) and not cell.reset_after:
            name = found.layer.recurrences[0].label
            text = (
                "PyTorch exported this file, and its GRU computes r ⊙ (U h); this node, without "
                "linear_before_reset = 1, computes U (r ⊙ h), which is another network"
            )
            self.findings.append(finding("RA133", name, text))

    def _loop(self, node: ir.Node, scope: str) -> None:
        inside = _recurrent(list(_bodies(node)), self.model)
        name = self._unique(node)
        where = f"{scope}/{name.lstrip('/')}" if scope else name
        if inside:
            reason = (
                f"a recurrence inside the body of a {node.op_type} is not read; it holds {inside}"
            )
            self.skipped.append(Skipped(where, reason))
            return
        try:
            found = read_loop(node, self.wiring, where, scope, self.opset)
        except Refused as refused:
            self.skipped.append(Skipped(where, f"{node.op_type}: {refused}"))
            return
        except MALFORMED as error:
            self.skipped.append(Skipped(where, _broken(node, error)))
            return
        if found is not None:
            node.name = name
            self.reads += closed(found)

    def _unique(self, node: ir.Node) -> str:
        """Return the node's name, or one like it where it has none or shares it."""
        wanted = node.name or _output_name(node)
        name, count = wanted, 1
        while self._names[name] > bool(node.name == name):
            count += 1
            name = f"{wanted}_{count}"
        self._names[name] += name != node.name
        return name

    def _reason(self, node: ir.Node) -> str:
        """Say why a node that may hold a recurrence is not read; nothing where it holds none."""
        called = self.model.functions.get(node.op_identifier())
        if called is not None:
            inside = _recurrent([called], self.model)
            return f"the function {node.op_type} holds {inside}, not read yet" if inside else ""
        if node.domain not in _STANDARD and _KINDS.search(node.op_type):
            return f"{node.domain}.{node.op_type} is not read yet"
        return ""


def _is_recurrent(node: ir.Node) -> bool:
    if node.domain == "com.microsoft":
        return node.op_type == QUANTISED
    return node.op_type in GATES and node.domain in _STANDARD


def _broken(node: ir.Node, error: BaseException) -> str:
    return f"{node.op_type}: it breaks its operator's rules ({brief(error)})"


def _output_name(node: ir.Node) -> str:
    return next((v.name for v in node.outputs if v.name), node.op_type)


def _path(node: ir.Node, scope: str) -> str:
    name = node.name or _output_name(node)
    return f"{scope}/{name.lstrip('/')}" if scope else name


def _bodies(node: ir.Node) -> Iterator[ir.Graph]:
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            graphs: Sequence[ir.Graph] = attribute.as_graphs()
            yield from graphs


def _nodes(graphs: Iterable[ir.Graph | ir.Function]) -> Iterator[ir.Node]:
    """Yield every node, those of bodies included."""
    waiting = list(graphs)
    while waiting:
        for node in waiting.pop():
            yield node
            waiting.extend(_bodies(node))


def _recurrent(graphs: Iterable[ir.Graph | ir.Function], model: ir.Model) -> str:
    """Name the kinds of recurrences inside, functions that are called there included."""
    kinds: Counter[str] = Counter()
    waiting: list[ir.Graph | ir.Function] = list(graphs)
    called: set[ir.OperatorIdentifier] = set()
    while waiting:
        for node in _nodes([waiting.pop()]):
            function = model.functions.get(node.op_identifier())
            if function is not None:
                if node.op_identifier() not in called:
                    called.add(node.op_identifier())
                    waiting.append(function)
            elif node.op_type in LOOPS or _KINDS.search(node.op_type):
                kinds[node.op_type] += 1
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))


def _census(model: ir.Model) -> str:
    graphs: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    counts = Counter(node.op_type for node in _nodes(graphs)).most_common()
    return f"{sum(n for _, n in counts)} nodes ({listed([f'{n} {op}' for op, n in counts], 8)})"
