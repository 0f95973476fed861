"""Whatever is known of a value before it runs is true of it when ONNX Runtime runs it."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rnnaudit.loaders.onnx.axes import Size, length
from rnnaudit.loaders.onnx.contents import Spread
from rnnaudit.loaders.onnx.values import Knowledge

DIMS = {"X:0": 6, "X:1": 2, "X:2": 3}


class Graph:
    """A graph under construction: each node is visited as it is added."""

    def __init__(self):
        self.known = Knowledge()
        self.nodes, self.initializers = [], []
        self.X = ir.Value(
            name="X", shape=ir.Shape(["T", "N", 3]), type=ir.TensorType(ir.DataType.FLOAT)
        )

    def constant(self, array):
        array = np.asarray(array)
        name = f"c{len(self.initializers)}"
        value = ir.Value(
            name=name,
            shape=ir.Shape(array.shape),
            type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
            const_value=ir.tensor(array, name=name),
        )
        self.initializers.append(value)
        return value

    def op(self, kind, *inputs, outputs=1, **attributes):
        node = ir.node(kind, list(inputs), attributes=attributes or None, num_outputs=outputs)
        for i, value in enumerate(node.outputs):
            value.name = f"v{len(self.nodes)}_{i}"
        self.nodes.append(node)
        return node.outputs if outputs > 1 else node.outputs[0]

    def run(self, value):
        """Learn about every node, and return what the runtime gives for ``value``."""
        value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
        graph = ir.Graph([self.X], [value], nodes=self.nodes, opset_imports={"": 17}, name="g")
        for initializer in self.initializers:
            graph.register_initializer(initializer)
        for node in graph:
            self.known.visit(node)
        proto = ir.to_proto(ir.Model(graph, ir_version=8))
        proto.graph.output[0].ClearField("type")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(
            proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return session.run(None, {"X": X})[0]


X = np.random.default_rng(0).integers(-9, 9, size=(6, 2, 3)).astype(np.float32)


def axes(array):
    return st.integers(0, array.ndim - 1)


@st.composite
def moved(draw, graph, value, array, *, cuts=True):
    """Add one operator that moves entries; return its output and what NumPy makes of it."""
    kinds = ["Unsqueeze", "Identity"]
    if array.ndim:
        kinds += ["Transpose", "Reshape", "Flatten"]
        kinds += ["Slice", "Gather", "Split", "Concat"] if cuts else []
    if 1 in array.shape:
        kinds += ["Squeeze", "Squeeze"]
    kind = draw(st.sampled_from(kinds))
    if kind == "Identity":
        return graph.op(kind, value), array
    if kind == "Unsqueeze":
        axis = draw(st.integers(0, array.ndim))
        return graph.op(kind, value, graph.constant([axis])), np.expand_dims(array, axis)
    axis = draw(axes(array))
    if kind == "Squeeze":
        axis = draw(st.sampled_from([i for i, n in enumerate(array.shape) if n == 1]))
        negative = axis - array.ndim
        return graph.op(kind, value, graph.constant([negative])), array.squeeze(axis)
    if kind == "Transpose":
        perm = draw(st.permutations(range(array.ndim)))
        return graph.op(kind, value, perm=list(perm)), array.transpose(perm)
    if kind == "Reshape":
        shape = draw(st.sampled_from([[-1], [0, -1] if array.ndim > 1 else [-1], [1, -1], [-1, 1]]))
        wanted = [array.shape[i] if n == 0 else n for i, n in enumerate(shape)]
        return graph.op(kind, value, graph.constant(shape)), array.reshape(wanted)
    if kind == "Flatten":
        sides = math.prod(array.shape[:axis]), math.prod(array.shape[axis:])
        return graph.op(kind, value, axis=axis), array.reshape(sides)
    size = array.shape[axis]
    if kind == "Slice":
        step = draw(st.sampled_from([1, 1, 2, -1]))
        start = draw(st.sampled_from([0, draw(st.integers(0, size - 1))]))
        if step > 0:
            end = draw(st.sampled_from([2**63 - 1, draw(st.integers(start + 1, size + 3))]))
            cut = slice(start, end, step)
        else:
            end, cut = -(2**40), slice(start, None, step)
        settings_ = (graph.constant([n]) for n in (start, end, axis, step))
        at = tuple(cut if i == axis else slice(None) for i in range(array.ndim))
        return graph.op(kind, value, *settings_), array[at]
    if kind == "Gather":
        index = draw(st.sampled_from([np.array(size - 1), np.array([0]), np.array([0, size - 1])]))
        taken = np.take(array, index, axis=axis)
        return graph.op(kind, value, graph.constant(index), axis=axis), np.asarray(taken)
    if kind == "Concat":
        return graph.op(kind, value, value, axis=axis), np.concatenate([array, array], axis=axis)
    first = draw(st.integers(1, size)) if size > 1 else 1
    if first == size:
        return graph.op("Identity", value), array
    parts = graph.op(kind, value, graph.constant([first, size - first]), outputs=2, axis=axis)
    pick = draw(st.integers(0, 1))
    return parts[pick], np.split(array, [first], axis=axis)[pick]


@st.composite
def computed(draw, graph, value, array):
    """Add one elementwise operator with a constant."""
    kind = draw(st.sampled_from(["Add", "Sub", "Mul", "Div", "Neg", "Where", "Expand"]))
    two = np.array(2, dtype=array.dtype)
    if kind == "Neg":
        return graph.op(kind, value), -array
    if kind == "Where":
        equal = graph.op("Equal", value, graph.constant(np.array(-1, dtype=array.dtype)))
        return graph.op(kind, equal, graph.constant(two), value), np.where(array == -1, two, array)
    if kind == "Expand":
        shape = (2, *array.shape)
        return graph.op(kind, value, graph.constant(np.array(shape))), np.broadcast_to(array, shape)
    a, b = (value, graph.constant(two)) if draw(st.booleans()) else (graph.constant(two), value)
    x, y = (array, two) if a is value else (two, array)
    if kind == "Div":
        if (y == 0).any():
            return value, array
        exact = np.trunc(x / y) if array.dtype.kind == "i" else x / y
        return graph.op(kind, a, b), exact.astype(array.dtype)
    result = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply}[kind](x, y)
    return graph.op(kind, a, b), result


def grown(data, graph, value, array, *, steps, arithmetic=True):
    for _ in range(steps):
        rule = computed if arithmetic and data.draw(st.booleans()) else moved
        if array.size > 2000 or array.ndim > 5:
            break
        value, array = data.draw(rule(graph, value, array))
    return value, array


def finished(graph, value, array):
    """End in an operator, so that an input or initializer can be an output too."""
    value = graph.op("Identity", value)
    theirs = graph.run(value)
    np.testing.assert_array_equal(theirs, array)  # the runtime agrees with NumPy
    return value, theirs


def number(entry):
    """Return a symbolic size's value for this X; None where it may be any integer."""
    if not isinstance(entry, Size):
        return entry
    if not entry.axes or all(name in DIMS for name in entry.axes):
        return entry.factor * math.prod(DIMS[name] for name in entry.axes)
    return None


@settings(max_examples=60)
@given(data=st.data(), steps=st.integers(1, 8), kind=st.sampled_from([np.float32, np.int64]))
def test_constants_are_folded_as_the_runtime_computes_them(data, steps, kind):
    graph = Graph()
    start = np.arange(12).reshape(2, 2, 3).astype(kind)
    value, array = grown(data, graph, graph.constant(start), start, steps=steps)
    value, theirs = finished(graph, value, array)
    ours = graph.known.constant(value)
    assert ours is not None
    np.testing.assert_array_equal(ours, theirs)


@settings(max_examples=60)
@given(data=st.data(), steps=st.integers(0, 6))
def test_sizes_that_the_input_decides_are_known_as_products_of_its_axes(data, steps):
    graph = Graph()
    value = graph.op("Shape", graph.X)
    array = np.array(X.shape)
    value, array = grown(data, graph, value, array, steps=steps)
    value, theirs = finished(graph, value, array)
    ours = graph.known.content(value)
    if isinstance(ours, Spread):
        ours = np.broadcast_to(ours.core, theirs.shape)
    assert ours is None or ours.shape == theirs.shape
    for entry, wanted in zip([] if ours is None else ours.ravel(), theirs.ravel(), strict=False):
        found = number(entry)
        assert found is None or found == wanted
    if not steps:
        assert [number(entry) for entry in ours] == [6, 2, 3]


@settings(max_examples=80)
@given(data=st.data(), steps=st.integers(0, 6), how=st.sampled_from(["fill", "expand", "blind"]))
def test_what_is_spread_over_an_unknown_shape_holds_its_core_everywhere(data, steps, how):
    graph = Graph()
    shape = graph.op("Shape", graph.X)
    batch = graph.op("Gather", shape, graph.constant([1]))
    if how == "blind":  # a size of which nothing is known
        batch = graph.op("Sub", graph.op("Add", batch, batch), batch)
    target = graph.op("Concat", graph.constant([2]), batch, graph.constant([3]), axis=0)
    if how == "fill":
        fill = ir.tensor(np.float32([0.5]))
        value, array = graph.op("ConstantOfShape", target, value=fill), np.full((2, 2, 3), 0.5)
    else:
        stored = np.arange(6).reshape(2, 1, 3).astype(np.float32)
        value = graph.op("Expand", graph.constant(stored), target)
        array = np.broadcast_to(stored, (2, 2, 3))
    array = array.astype(np.float32)
    value, array = grown(data, graph, value, array, steps=steps)
    value, theirs = finished(graph, value, array)
    ours = graph.known.content(value)
    assert ours is not None or steps
    if isinstance(ours, Spread):
        np.testing.assert_array_equal(np.broadcast_to(ours.core, theirs.shape), theirs)
        assert ours.rank in {None, theirs.ndim}
    elif ours is not None:
        np.testing.assert_array_equal(ours, theirs)


@settings(max_examples=80)
@given(data=st.data(), steps=st.integers(1, 7), cuts=st.booleans())
def test_a_layout_says_how_a_value_is_dealt_out_of_its_origin(data, steps, cuts):
    graph = Graph()
    value, array = graph.X, X
    for _ in range(steps):
        if array.ndim > 5:
            break
        value, array = data.draw(moved(graph, value, array, cuts=cuts))
    value, theirs = finished(graph, value, array)
    layout = graph.known.layout(value)
    if layout is None or layout.origin is not graph.X:
        assert cuts  # entries were dropped or repeated: nothing is claimed
        return
    sizes = {"X:0": 6, "X:1": 2, "X:2": 3}
    atoms = [atom.name for axis in layout.axes for atom in axis]
    assert sorted(atoms) == sorted(sizes)
    order = [list(sizes).index(name) for name in atoms]
    assert [number(length(axis)) for axis in layout.axes] == list(theirs.shape)
    np.testing.assert_array_equal(X.transpose(order).reshape(theirs.shape), theirs)


@pytest.mark.parametrize(
    ("start", "end", "step", "kept"),
    [(0, 2**63 - 1, 1, True), (0, 9, 1, False), (1, 2**63 - 1, 1, False), (0, 2**63 - 1, 2, False)],
)
def test_a_slice_of_all_entries_changes_nothing(start, end, step, kept):
    graph = Graph()
    cut = graph.op("Slice", graph.X, *(graph.constant([n]) for n in (start, end, 0, step)))
    theirs = graph.run(cut)
    layout = graph.known.layout(cut)
    assert (layout is not None and layout.origin is graph.X) == kept
    assert np.array_equal(theirs, X) == (kept or end == 9)  # X has six rows, which is not known


def test_a_reshape_by_computed_sizes_is_followed():
    graph = Graph()
    shape = graph.op("Shape", graph.X)
    rows = graph.op(
        "Mul",
        graph.op("Gather", shape, graph.constant([0])),
        graph.op("Gather", shape, graph.constant([1])),
    )
    target = graph.op("Concat", rows, graph.constant([3]), axis=0)
    flat = graph.op("Reshape", graph.X, target)
    graph.run(flat)
    layout = graph.known.layout(flat)
    assert layout.origin is graph.X
    assert [[atom.name for atom in axis] for axis in layout.axes] == [["X:0", "X:1"], ["X:2"]]


@pytest.mark.parametrize("axis", [None, 1])
def test_quantised_constants_are_dequantised_as_the_runtime_does_it(axis):
    graph = Graph()
    q = np.random.default_rng(1).integers(-128, 127, size=(2, 3)).astype(np.int8)
    scale, zero = np.float32(0.03), np.int8(5)
    if axis is not None:
        scale, zero = np.float32([0.03, 0.5, 0.25]), np.int8([5, -3, 0])
    attributes = {} if axis is None else {"axis": axis}
    inputs = (graph.constant(a) for a in (q, scale, zero))
    value = graph.op("DequantizeLinear", *inputs, **attributes)
    theirs = graph.run(value)
    np.testing.assert_array_equal(graph.known.constant(value), theirs)
