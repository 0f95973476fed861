"""Graph surgery: chosen recurrent nodes are truncated, everything else stays as it was."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from rnnaudit.errors import UnsupportedModelError, UsageError
from rnnaudit.export.build import OPSET, assemble, check_opset, ir_version, opset_of
from rnnaudit.export.emit import INT64_MAX, OLDEST_OPSET, Emitter
from rnnaudit.export.guard import add_guard
from rnnaudit.export.layers import write_layer
from rnnaudit.export.names import taken, unused
from rnnaudit.export.past import add_buffers
from rnnaudit.export.reads import Readers
from rnnaudit.export.sequences import LayerStates, Start, Wanted
from rnnaudit.export.sockets import Socket, socket
from rnnaudit.export.stepwise import Widened, stepwise
from rnnaudit.model import Layer, Model
from rnnaudit.truncation import WINDOW, Form
from rnnaudit.verification.states import carried


def truncate_graph(
    model: Model,
    depths: Mapping[str, int],
    forms: Mapping[str, Form] | None = None,
    *,
    opset: int | None = None,
    guarded: bool = False,
    metadata: Mapping[str, str] | None = None,
) -> ir.Model:
    """Return the model's graph with each chosen layer truncated; the source is not touched.

    A layer is replaced when all of its directions have a depth. A model that came without a
    graph gets one, ``x`` [time, batch, I] to ``y`` [time, batch, O]. Graph inputs that were
    only the initial states of replaced layers are dropped, and zero is assumed for them; so are
    the outputs that hold those states' sequels. A graph of one step per call takes the steps
    of a sequence and gives the outputs after the last one.

    Args:
        model: The model as loaded.
        depths: Truncation depth, at least 1, by ``Recurrence.label``.
        forms: Form of a layer by the label of its first recurrence; a window where none is named.
        opset: Opset of the result; without, that of the graph, raised where the forms need it.
        guarded: Whether one more output tells how far the results at depth k are from those
            at depth ⌈k/2⌉, over all units, steps and sequences of this run.
        metadata: What to store beside version, depths and source hash; keys get the prefix
            ``rnnaudit.``.

    Raises:
        UsageError: A depth is below 1 or names no recurrence of the model, or the opset is not
            one that the forms are written in.
        UnsupportedModelError: A chosen layer reads sequence lengths, or the graph has no such
            opset.
    """
    forms = forms or {}
    layers = [
        layer
        for stack in model.stacks
        for layer in (*stack.layers, *model.twins.get(stack.name, ()))
    ]
    _check_depths(layers, depths)
    chosen = [layer for layer in layers if all(r.label in depths for r in layer.recurrences)]
    if model.graph is None:
        result = assemble(
            model.stacks,
            depths,
            forms,
            opset=opset or OPSET,
            dtype=model.dtype,
            guarded=guarded,
        )
    else:
        _, _, result = converted(model.graph, opset)
        widened = Widened(result.graph)
        single = () if any(f.past for f in forms.values()) else stepwise(model)
        replaced = [
            _replace(
                result,
                layer,
                depths,
                forms.get(layer.recurrences[0].label, WINDOW),
                guarded=guarded,
                widened=widened if layer in single else None,
            )
            for layer in chosen
        ]
        add_buffers(result, replaced)
        dropped = _drop_states(model, result.graph, chosen)
        if guarded:
            add_guard(result, replaced, opset_of(result.graph))
        if dropped:
            result.metadata_props["rnnaudit.dropped"] = json.dumps(dropped)
        if widened.axes:
            result.metadata_props["rnnaudit.last_step_of"] = json.dumps(widened.axes)
    written = [
        (r, forms.get(layer.recurrences[0].label, WINDOW))
        for layer in chosen
        for r in layer.recurrences
    ]
    stored = {
        "version": _version(),
        "form": json.dumps({r.label: f.describe() for r, f in written}),
        "blocks": json.dumps({r.label: f.block for r, f in written}),
        "depths": json.dumps({r.label: depths[r.label] for r, _ in written}),
        "source_sha256": model.sha256,
        **(metadata or {}),
    }
    for key, value in stored.items():
        name = key if key.startswith("rnnaudit.") else f"rnnaudit.{key}"
        result.metadata_props[name] = value
    return result


def _version() -> str:
    from rnnaudit import __version__

    return __version__


def _check_depths(layers: Iterable[Layer], depths: Mapping[str, int]) -> None:
    labels = [r.label for layer in layers for r in layer.recurrences]
    for label, depth in depths.items():
        if label not in labels:
            raise UsageError(f"a depth must name one of {', '.join(labels)}, got {label}")
        if depth < 1:
            raise UsageError(f"the depth of {label} must be at least 1, got {depth}")


def without_opset(wanted: int | None, target: int) -> str:
    """Say what to do where a graph does not convert to an opset, asked for or not."""
    again = f"export the model again in opset {target}"
    return again if wanted is None else f"leave out --opset, or {again}"


def converted(model: ir.Model, wanted: int | None) -> tuple[int, int, ir.Model]:
    """Convert a graph to the opset that is wanted, or to one that the forms are written in.

    Returns:
        Its own opset, the new one and the graph in it; the source is not touched.

    Raises:
        UsageError: No form can be written in that opset.
        UnsupportedModelError: The graph has no such opset.
    """
    model = model.clone()
    opset = opset_of(model.graph)
    if wanted is not None:
        check_opset(wanted)
    target = wanted or (opset if opset >= OLDEST_OPSET else OPSET)
    model.ir_version = max(model.ir_version, 4)  # initializers that are no inputs
    if opset == target:
        return opset, target, model
    model.ir_version = max(model.ir_version, ir_version(target))
    import onnx.version_converter

    if newer := _newer(model.graph, target):
        kind = max(newer, key=newer.__getitem__)
        raise UnsupportedModelError(
            f"opset {target} was wanted, got a graph with {kind}, which came with opset "
            f"{newer[kind]}",
            help=f"leave out --opset, or give --opset {newer[kind]} or more",
        )
    ir.external_data.load_to_model(model)
    try:
        proto = onnx.version_converter.convert_version(ir.to_proto(model), target)
        return opset, target, ir.from_proto(proto)
    except Exception as error:
        raise UnsupportedModelError(
            f"opset {target} was wanted, and onnx cannot convert the graph from {opset}: "
            f"{_brief(error)}",
            help=without_opset(wanted, target),
        ) from error


def _newer(graph: ir.Graph, opset: int) -> dict[str, int]:
    """Return the operators that the opset does not have yet, with the opset that brought them."""
    import onnx.defs

    first: dict[str, int] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "":
            since = first.get(schema.name, schema.since_version)
            first[schema.name] = min(since, schema.since_version)
    kinds = {node.op_type for node in graph.all_nodes() if node.domain in ("", "ai.onnx")}
    return {kind: first[kind] for kind in sorted(kinds) if first.get(kind, 0) > opset}


def _brief(error: Exception) -> str:
    """Return the last sentence of the converter's message, without places in its source."""
    return " ".join(str(error).split()).rpartition("failed: ")[2][:200]


def _replace(
    model: ir.Model,
    layer: Layer,
    depths: Mapping[str, int],
    form: Form,
    *,
    guarded: bool,
    widened: Widened | None = None,
) -> LayerStates:
    """Put a truncated form where the layer's node was, under the names of the node's outputs."""
    site = layer.site
    assert site is not None
    at = socket(model.graph, site)
    node, x = at.node, at.x
    graph = node.graph
    assert graph is not None
    if at.directed:
        _check_lengths(node, x, site.layout)
    if widened is not None:
        x = widened.of(x, site.layout, 3)
    emit = Emitter(_prefix(model.graph, site.node), at.dtype, opset_of(model.graph))
    inner = x if site.layout == 0 else emit.op("Transpose", x, name="x", perm=[1, 0, 2])
    if x.shape is not None and site.layout == 1:
        inner.shape = ir.Shape([x.shape[1], x.shape[0], x.shape[2]])
    read = [value is not None and _used(value) for value in at.outputs]
    steps, h, c = (*read, False, False)[:3]
    wanted = Wanted(steps, h, c, guard=guarded)
    given = _computed(emit, node, layer, site.layout) if at.directed else []
    states = write_layer(emit, layer, inner, depths, form=form, wanted=wanted, given=given)
    written = [_written(emit, states, i, at) if read[i] else None for i in range(len(read))]
    if widened is not None and written[0] is not None:
        every, bounds = written[0], (emit.integers(i) for i in (-1, INT64_MAX, site.layout))
        written[0] = emit.op("Slice", every, *bounds, name="Y_last_step")
        widened.wide[written[0]] = every
    graph.insert_before(node, emit.nodes)
    for value in emit.initializers:
        graph.register_initializer(value)
    if form.name == "last" and widened is None:
        _shorten(at)
    for old, new in zip(at.outputs, written, strict=True):
        if old is not None and new is not None:
            _take_over(old, new)
    _remove(node)
    return states


def _computed(emit: Emitter, node: ir.Node, layer: Layer, layout: int) -> list[Start]:
    """Write the initial states that the graph computes, [N, H] for each direction and part."""
    if layer.recurrences[0].initial.source != "computed":
        return []
    starts = []
    for d in range(len(layer.recurrences)):
        parts: list[ir.Value | None] = []
        for value, name in zip(node.inputs[5:7], "hc", strict=False):
            if value is None:
                parts.append(None)
                continue
            bounds = emit.integers(d), emit.integers(d + 1), emit.integers(layout)
            one = emit.op("Slice", value, *bounds, name=f"{name}_{d}_given")
            rows = emit.integers(-1, layer.recurrences[d].cell.hidden_size)
            parts.append(emit.op("Reshape", one, rows, name=f"{name}_{d}_start"))
        starts.append(tuple(parts))
    return starts


def _used(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()


def _check_lengths(node: ir.Node, x: ir.Value, layout: int) -> None:
    """Refuse sequence lengths, unless they are stored and say that every sequence is full."""
    lengths = node.inputs[4] if len(node.inputs) > 4 else None
    if lengths is None:
        return
    stored = ir.convenience.get_const_tensor(lengths)
    T = x.shape[layout] if x.shape is not None else None
    if stored is not None and isinstance(T, int) and bool((stored.numpy() == T).all()):
        return
    raise UnsupportedModelError(
        f"a layer to truncate must read whole sequences, got sequence_lens ({lengths.name}) at "
        f"node {node.name}",
        help="leave this layer out, or export the model without sequence lengths",
    )


def _prefix(graph: ir.Graph, wanted: str) -> str:
    """Return ``wanted`` or a name like it below which nothing in the graph is called yet."""
    names = taken(graph)
    return unused(wanted, {name[:i] for name in names for i, c in enumerate(name) if c == "/"})


def _written(emit: Emitter, states: LayerStates, output: int, at: Socket) -> ir.Value:
    """Write Y [T, D, N, H], Y_h or Y_c [D, N, H], or what layout 1 makes of them.

    What a Loop or a Scan gives has no axis of directions.
    """
    if not at.directed and output > 0:
        return states.states[0].final[output - 1]
    if not at.directed:
        value, perm = states.outputs(emit), [1, 0, 2]
    elif output == 0:
        value, perm = states.directions(emit), [2, 0, 1, 3]
    else:
        value, perm = states.final(emit, output - 1), [1, 0, 2]
    name = ("Y", "Y_h", "Y_c")[output]
    return emit.op("Transpose", value, name=name, perm=perm) if at.time == 1 else value


def _shorten(at: Socket) -> None:
    """Forget the shapes of what holds fewer steps from here on."""
    readers = Readers()
    if at.outputs[0] is not None:
        readers.final_steps(at.outputs[0], at.time, at.rank)
    for value in readers.path:
        value.shape = None


def _take_over(old: ir.Value, new: ir.Value) -> None:
    """Let ``new`` stand wherever ``old`` stood, name, type and shape included."""
    name = old.name
    new.type, new.shape = old.type, old.shape
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    old.name = f"{name}/replaced"
    new.name = name


def _remove(node: ir.Node) -> None:
    """Remove a node that nothing reads, and what was there only to feed it."""
    pending = [node]
    while pending:
        gone = pending.pop()
        sources = [v for v in gone.inputs if v is not None] + _captured(gone)
        graph = gone.graph
        assert graph is not None
        graph.remove(gone, safe=True)
        for value in sources:
            producer = value.producer()
            if _used(value):
                continue
            if producer is None:
                _forget(value)
            elif _idle(producer) and producer not in pending:
                pending.append(producer)


def _captured(node: ir.Node) -> list[ir.Value]:
    """Return what the bodies of a node take from outside, and let them let go of it."""
    found: dict[ir.Value, None] = {}
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            body = attribute.as_graph()
            own = {v for inner in body.all_nodes() for v in inner.outputs} | {*body.inputs}
            own |= {*body.initializers.values()}
            for inner in body.all_nodes():
                for i, value in enumerate(inner.inputs):
                    if value is not None and value not in own:
                        found[value] = None
                        inner.replace_input_with(i, None)
    return list(found)


def _idle(node: ir.Node) -> bool:
    """Return whether nothing reads the node; one that holds subgraphs is left in place."""
    graphs = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return not any(_used(v) for v in node.outputs) and not any(
        a.type in graphs for a in node.attributes.values()
    )


def _forget(value: ir.Value) -> None:
    """Drop an initializer; old models list initializers among the inputs too."""
    graph = value.graph
    if graph is None or value.name is None or graph.initializers.get(value.name) is not value:
        return
    del graph.initializers[value.name]
    if value in graph.inputs:
        graph.inputs.remove(value)


def _drop_states(model: Model, graph: ir.Graph, layers: Sequence[Layer]) -> list[str]:
    """Drop initial states that nothing reads any more, and the outputs that are their sequels.

    Returns:
        The names of the outputs that are gone.
    """
    names = {name for layer in layers for r in layer.recurrences for name in r.initial.inputs}
    gone = [v for v in graph.inputs if v.name in names and not _used(v)]
    for value in gone:
        graph.inputs.remove(value)
    sequels = carried(model)
    ends = {sequels.get(str(v.name)) for v in gone}
    dropped = [v for v in graph.outputs if v.name in ends]
    if len(dropped) == len(graph.outputs):
        return []  # a state that is the model's only result
    for value in dropped:
        graph.outputs.remove(value)
        node = value.producer()
        if node is not None and _idle(node):
            _remove(node)
    return [str(value.name) for value in dropped]
