"""Sequences come out as they went in, whichever container they came in."""

import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import save_file
from scipy.io import wavfile

from rnnaudit.data import MAX_YIELDED, UNNAMED, load_data, parse_range
from rnnaudit.errors import LoadError, UsageError

finite = st.floats(-1e6, 1e6)
two_axes = hnp.arrays(
    np.float64, hnp.array_shapes(min_dims=2, max_dims=2, max_side=6), elements=finite
)
three_axes = hnp.arrays(
    np.float64, hnp.array_shapes(min_dims=3, max_dims=3, max_side=5), elements=finite
)


def unnamed(spec, **axes):
    data = load_data(str(spec), **axes)
    assert list(data.inputs) == [UNNAMED]
    return data.inputs[UNNAMED]


def test_every_container_gives_the_same_sequence(tmp_path):
    x = np.random.default_rng(0).normal(size=(17, 3))
    np.save(tmp_path / "a.npy", x)
    np.savez(tmp_path / "a.npz", x=x)
    np.savez_compressed(tmp_path / "b.npz", anything=x)
    save_file({"x": x}, tmp_path / "a.safetensors")
    np.savetxt(tmp_path / "a.csv", x, delimiter=",", fmt="%.17g", header="p,q,r", comments="")
    np.savetxt(tmp_path / "b.csv", x, delimiter=";", fmt="%.17g")
    np.savetxt(tmp_path / "c.csv", x, fmt="%.17g")
    for file in sorted(tmp_path.iterdir()):
        (sequence,) = unnamed(file)
        np.testing.assert_array_equal(sequence, x)
        assert sequence.dtype == np.float64


@given(x=two_axes)
@settings(max_examples=20, deadline=None)
def test_two_axes_are_one_sequence(x, tmp_path_factory):
    path = tmp_path_factory.mktemp("d") / "x.npy"
    np.save(path, x)
    np.testing.assert_array_equal(unnamed(path)[0], x)
    np.testing.assert_array_equal(unnamed(path, time_axis=1)[0], x.T)
    np.testing.assert_array_equal(np.stack(unnamed(path, batch_axis=0)), x[..., None])
    np.testing.assert_array_equal(np.stack(unnamed(path, batch_axis=-1)), x.T[..., None])


@given(x=three_axes, axes=st.permutations([0, 1, 2]))
@settings(max_examples=20, deadline=None)
def test_named_axes_undo_any_order_of_three(x, axes, tmp_path_factory):
    path = tmp_path_factory.mktemp("d") / "x.npy"
    np.save(path, x.transpose(axes))
    sequences = unnamed(path, batch_axis=axes.index(0), time_axis=axes.index(1))
    np.testing.assert_array_equal(np.stack(sequences), x)


def test_three_axes_are_batch_time_feature_and_time_takes_the_axis_left(tmp_path):
    x = np.arange(24.0).reshape(2, 3, 4)
    np.save(tmp_path / "x.npy", x)
    np.testing.assert_array_equal(np.stack(unnamed(tmp_path / "x.npy")), x)
    time_first = unnamed(tmp_path / "x.npy", batch_axis=1)
    np.testing.assert_array_equal(np.stack(time_first), x.swapaxes(0, 1))


def test_one_axis_is_one_feature(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(5, dtype=np.float16))
    (x,) = unnamed(tmp_path / "x.npy")
    np.testing.assert_array_equal(x, np.arange(5.0)[:, None])


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.int32, np.uint64])
def test_integers_stay_integers(tmp_path, dtype):
    np.save(tmp_path / "tokens.npy", np.ones((1, 4), dtype))
    assert unnamed(tmp_path / "tokens.npy")[0].dtype == np.int64


def test_several_keys_are_graph_inputs(tmp_path):
    a, b = np.zeros((2, 5, 3)), np.ones((2, 7, 1))
    np.savez(tmp_path / "x.npz", audio=a, x=b)
    data = load_data(str(tmp_path / "x.npz"))
    assert {name: len(s) for name, s in data.inputs.items()} == {"audio": 2, "x": 2}
    assert data.width("audio") == 3
    assert data.lengths == (5, 5)


def test_lengths_split_sequences_joined_along_time(tmp_path):
    x = np.arange(12.0).reshape(6, 2)
    np.savez(tmp_path / "x.npz", x=x, lengths=np.array([1, 3, 2]))
    data = load_data(str(tmp_path / "x.npz"))
    assert data.lengths == (1, 3, 2)
    np.testing.assert_array_equal(np.concatenate(data.inputs[UNNAMED]), x)
    np.savez(tmp_path / "y.npz", x=x[:, 0], lengths=np.array([6]))
    assert unnamed(tmp_path / "y.npz")[0].shape == (6, 1)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (np.array([-32768, 0, 16384], np.int16), [-1, 0, 0.5]),
        (np.array([-(2**31), 0, 2**30], np.int32), [-1, 0, 0.5]),
        (np.array([0, 128, 192], np.uint8), [-1, 0, 0.5]),
        (np.array([-1, 0, 0.25], np.float32), [-1, 0, 0.25]),
    ],
)
def test_wave_files_are_scaled_to_one(tmp_path, stored, expected):
    wavfile.write(tmp_path / "x.wav", 16000, stored)
    np.testing.assert_array_equal(unnamed(tmp_path / "x.wav")[0][:, 0], expected)


def test_wave_channels_are_features(tmp_path):
    wavfile.write(tmp_path / "x.wav", 8000, np.zeros((10, 2), np.int16))
    assert unnamed(tmp_path / "x.wav")[0].shape == (10, 2)


def test_a_folder_is_one_sequence_for_each_file(tmp_path):
    np.save(tmp_path / "b.npy", np.full((3, 2), 2.0))
    np.savetxt(tmp_path / "a.csv", np.full((4, 2), 1.0), delimiter=",")
    (tmp_path / "README.md").write_text("not data")
    data = load_data(str(tmp_path))
    assert data.lengths == (4, 3)
    assert data.describe() == f"2 sequences of 3 to 4 steps from {tmp_path.name}"


def test_one_sequence_is_described_in_the_singular(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((1, 2)))
    assert load_data(str(tmp_path / "x.npy")).describe() == "1 sequence of 1 step from x.npy"


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Write a module in the working folder; return the specification of a function in it."""

    def write(body):
        name = f"feed_{tmp_path.name}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(body))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        return f"{name}:feed"

    before = set(sys.modules)
    yield write
    for name in set(sys.modules) - before:
        if name.startswith("feed_"):
            del sys.modules[name]


def test_a_function_yields_dicts_of_arrays(source):
    spec = source("""
        import torch

        def feed():
            yield {"a": torch.ones(3, 2), "b": [1, 2, 3]}
            yield {"b": [4], "a": [[5.0, 6.0]]}
    """)
    path = list(sys.path)
    data = load_data(spec)
    assert [x.shape for x in data.inputs["a"]] == [(3, 2), (1, 2)]
    assert [x.shape for x in data.inputs["b"]] == [(3, 1), (1, 1)]
    assert sys.path == path


def test_a_function_may_return_plain_arrays(source):
    assert [x.shape for x in unnamed(source("def feed(): return [[1.0, 2.0], [[3.0]]]"))] == [
        (2, 1),
        (1, 1),
    ]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("feed = 3", r"wanted a function 'feed' in feed_\w+, got none"),
        ("def feed(): return 1 / 0", "the function raised ZeroDivisionError: division by zero"),
        ("raise RuntimeError('no\\nmore')", r"importing feed_\w+ raised RuntimeError: no$"),
        ("def feed(): yield [[[1.0]]]", r"wanted one sequence \[T, F\], got shape \(1, 1, 1\)"),
        ("def feed(): yield [[1.0], [2.0, 3.0]]", "wanted an array of numbers"),
        ("def feed(): return iter(())", "wanted at least one sequence, got none"),
        (
            "def feed(): yield from ({'a': [1.0]}, {'b': [1.0]})",
            r"wanted inputs \['a'\] as in the first sequence, got \['b'\] in sequence 1",
        ),
    ],
)
def test_a_function_that_does_not_deliver_is_named(source, body, words):
    with pytest.raises(LoadError, match=words):
        load_data(source(body))


def test_an_endless_function_is_stopped(source):
    with pytest.raises(LoadError, match=f"wanted at most {MAX_YIELDED} sequences"):
        load_data(
            source("""
            import itertools, numpy

            def feed():
                return itertools.repeat(numpy.zeros((1, 1)))
        """)
        )


def test_no_code_runs_unless_the_form_asks_for_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trap.py").write_text("raise SystemExit('ran')")
    for spec in ("trap", "trap.py", "./trap:feed", "trap:feed()", "trap:"):
        with pytest.raises(LoadError, match=r"data must be|which does not exist"):
            load_data(spec)


def write_npy(array):
    return lambda path: np.save(path, array, allow_pickle=True)


def write_npz(**arrays):
    return lambda path: np.savez(path, **arrays)


def write_one_array(path):
    with path.open("wb") as file:
        np.save(file, np.zeros(2))


@pytest.mark.parametrize(
    ("name", "write", "words"),
    [
        ("x.npy", write_npy(np.array([[1.0, np.nan]])), r"got nan at index \(0, 1\)"),
        ("x.npy", write_npy(np.array([[1.0], [-np.inf]])), r"got -inf at index \(1, 0\)"),
        ("x.npy", write_npy(np.array([{}])), "Object arrays cannot be loaded"),
        (
            "x.npy",
            write_npy(np.zeros((0, 3))),
            r"at least one step and one feature, got shape \(0, 3\)",
        ),
        ("x.npy", write_npy(np.zeros((3, 0))), "at least one step and one feature"),
        ("x.npy", write_npy(np.zeros((0, 2, 3))), "wanted at least one sequence, got none"),
        (
            "x.npy",
            write_npy(np.zeros(())),
            r"wanted sequences \[T, F\] or \[N, T, F\], got shape \(\)",
        ),
        ("x.npy", write_npy(np.zeros((1, 2, 3, 4))), r"got shape \(1, 2, 3, 4\); flatten"),
        ("x.npy", write_npy(np.array(["a"])), "got dtype <U1"),
        ("x.npy", write_npy(np.array([1j])), "got dtype complex128"),
        ("x.npy", write_npy(np.array([2**63], np.uint64)), "wanted integers below 2⁶³"),
        ("x.npy", lambda p: p.write_bytes(b""), "cannot be read as .npy: the file is empty"),
        ("x.npy", lambda p: p.write_bytes(b"\x93NUMPY"), "cannot be read as .npy"),
        ("x.npy", lambda p: p.write_text("hello"), "cannot be read as .npy"),
        ("x.npz", lambda p: p.write_bytes(b"PK\x03\x04junk"), "cannot be read as .npz"),
        ("x.npz", write_one_array, "it holds one array; name it .npy"),
        ("x.npz", write_npz(), "wanted at least one array, got none"),
        (
            "x.npz",
            write_npz(a=np.zeros((2, 3, 1)), b=np.zeros((4, 3, 1))),
            "wanted as many sequences for each input, got {'a': 2, 'b': 4}",
        ),
        (
            "x.npz",
            write_npz(x=np.zeros((4, 1)), lengths=np.array([1, 2])),
            "wanted lengths that add up to 4 steps, got 3",
        ),
        (
            "x.npz",
            write_npz(x=np.zeros((4, 1)), lengths=np.array([-1, 5])),
            "wanted lengths of at least 1 step, got -1",
        ),
        (
            "x.npz",
            write_npz(x=np.zeros((10, 1)), lengths=np.array([2**62, 2**62, 2**62, 2**62 + 10])),
            "wanted lengths that add up to 10 steps, got 18446744073709551626",
        ),
        (
            "x.npz",
            write_npz(x=np.zeros((4, 1)), lengths=np.array([4.0])),
            r"beside integer lengths \[N\], got shape \(4, 1\) beside float64",
        ),
        ("x.safetensors", lambda p: p.write_bytes(b"junk"), "cannot be read as .safetensors"),
        ("x.csv", lambda p: p.write_text(""), "it holds no row of numbers"),
        ("x.csv", lambda p: p.write_text("a,b\n"), "it holds no row of numbers"),
        ("x.csv", lambda p: p.write_text("a,b\n1,2\n3,oops\n"), "could not convert string 'oops'"),
        ("x.csv", lambda p: p.write_text("1,2\n3\n"), "cannot be read as .csv"),
        ("x.csv", lambda p: p.write_text("1,\n"), "cannot be read as .csv"),
        ("x.csv", lambda p: p.write_text("0x10,1\n2,3\n"), "could not convert string '0x10'"),
        ("x.csv", lambda p: p.write_text("time,1\n2,3\n"), "could not convert string 'time'"),
        ("x.wav", lambda p: p.write_bytes(b"RIFFjunk"), "cannot be read as .wav"),
        ("x.wav", lambda p: p.write_bytes(b"RIFF\0\0\0\0WAVE"), "cannot be read as .wav"),
        ("x.txt", lambda p: p.write_text("1"), "data must be one of .npy, .npz"),
        ("x", lambda p: p.mkdir(), "wanted a folder of .npy, .npz"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(tmp_path, name, write, words):
    write(tmp_path / name)
    with pytest.raises(LoadError, match=words) as refusal:
        load_data(str(tmp_path / name))
    assert refusal.value.id == "RA107"
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("byte", range(44))
@pytest.mark.parametrize("value", [0, 1, 255])
def test_a_recording_with_a_damaged_header_is_read_or_refused_in_one_line(tmp_path, byte, value):
    wavfile.write(tmp_path / "x.wav", 8000, np.arange(40, dtype=np.int16).reshape(20, 2))
    damaged = bytearray((tmp_path / "x.wav").read_bytes())
    damaged[byte] = value
    (tmp_path / "x.wav").write_bytes(bytes(damaged))
    with suppress(LoadError):  # one line each, by its own test
        load_data(str(tmp_path / "x.wav"))


def test_widths_must_agree_over_a_folder(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((2, 3)))
    np.save(tmp_path / "b.npy", np.zeros((2, 4)))
    with pytest.raises(LoadError, match=r"wanted 3 features as in a\.npy, got 4 in b\.npy"):
        load_data(str(tmp_path))


def test_the_axis_of_the_steps_alone_leaves_the_first_other_to_the_sequences(tmp_path):
    x = np.arange(24.0).reshape(2, 3, 4)
    np.save(tmp_path / "x.npy", x)
    for axis, named in enumerate([(1, 0, 2), (0, 1, 2), (0, 2, 1)]):
        sequences = unnamed(tmp_path / "x.npy", time_axis=axis)
        np.testing.assert_array_equal(np.stack(sequences), x.transpose(named))


def test_a_missing_source_is_named(tmp_path):
    with pytest.raises(LoadError, match=r"got nowhere\.npy, which does not exist"):
        load_data("nowhere.npy")


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"batch_axis": 3}, "an axis of .* must lie below 3, got 3; its shape is"),
        ({"time_axis": -4}, "an axis of .* must lie below 3, got -4"),
        ({"batch_axis": 1, "time_axis": -2}, "must differ, got 1 for both"),
    ],
)
def test_axes_that_do_not_exist_are_usage_errors(tmp_path, axes, words):
    np.save(tmp_path / "x.npy", np.zeros((2, 3, 4)))
    with pytest.raises(UsageError, match=words):
        load_data(str(tmp_path / "x.npy"), **axes)


@given(low=finite, high=finite)
def test_ranges_are_read_exactly(low, high):
    if low < high:
        assert parse_range(f"{low!r}:{high!r}") == (low, high)
    else:
        with pytest.raises(UsageError, match="two finite numbers with LO < HI"):
            parse_range(f"{low!r}:{high!r}")


@pytest.mark.parametrize("text", ["", "1", "1:2:3", "a:b", "nan:1", "0:inf", ":", "1:1"])
def test_other_ranges_are_refused(text):
    with pytest.raises(UsageError, match=r"must be LO:HI.*for example -1:1"):
        parse_range(text)


def test_relative_paths_are_taken_from_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.zeros((2, 1)))
    assert load_data("x.npy").source == "x.npy"
    assert Path(load_data("./x.npy").source) == Path("x.npy")
