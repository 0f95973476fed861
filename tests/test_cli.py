"""The command line passes on what was asked, prints what came back, and exits as it promised."""

import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from rich.cells import cell_len

import rnnaudit
from rnnaudit.cli import app, choices, config
from rnnaudit.errors import LoadError, UnsupportedModelError, UsageError
from rnnaudit.reports import RENDERERS, JsonRenderer
from rnnaudit.reports.json import schema
from rnnaudit.results import ProofFile, Replay
from tests import reports_by_hand as by_hand
from tests.program import run

COMMANDS = tuple(command.__name__ for command, _ in app.COMMANDS)
SLOW = ("torch", "onnx", "onnx_ir", "scipy", "onnxruntime", "numpy")


class FakeApi(types.ModuleType):
    """Remembers what it was called with; answers with reports made by hand."""

    def __init__(self):
        super().__init__("rnnaudit.api")
        self.calls = []
        self.answers = {
            "audit": by_hand.STABLE,
            "truncate": by_hand.TRUNCATE_PASS,
            "verify": replace(by_hand.VERIFY_NOTHING, equivalence=by_hand.PASS),
        }
        again = Replay("rnn[0]", 1e-3, "max", (3,), (0.2,), (0.2,), "PyTorch", "|x| ≤ 1", True)
        self.answers["replay"] = replace(by_hand.STABLE, replay=again)
        proof = ProofFile("model.proof.json", 4096, valid=True)
        self.answers |= dict.fromkeys(
            ("certify", "check"), replace(by_hand.STABLE, proof_file=proof)
        )

    def __getattr__(self, name):
        if name not in self.answers:
            raise AttributeError(name)

        def call(*models, **settings):
            self.calls.append((name, models, settings))
            answer = self.answers[name]
            if isinstance(answer, BaseException):
                raise answer
            return answer

        return call


@pytest.fixture
def api(monkeypatch, tmp_path):
    fake = FakeApi()
    monkeypatch.setitem(sys.modules, "rnnaudit.api", fake)
    monkeypatch.setattr(rnnaudit, "api", fake, raising=False)
    # `check` starts fast: it loads a model and proves a file again without the public API.
    monkeypatch.setattr("rnnaudit.checking.check", fake.check)
    monkeypatch.setattr("rnnaudit.loaders.load", lambda path, **_: path)
    monkeypatch.chdir(tmp_path)
    return fake


def program(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "rnnaudit", *arguments],
        check=False,
        capture_output=True,
        text=True,
        encoding="utf-8",
        **options,
    )


# -------------------------------------------------------------------------- what is passed


def test_inspect_passes_every_option_on_and_prints_the_report(api, capsys):
    np.save("x.npy", np.zeros((5, 2, 3)))
    code, out, err = run(
        capsys,
        *("inspect", "m.pt", "--eps", "1e-2", "--data", "x.npy", "--batch-axis", "1"),
        *("--input-range", "-1:2", "--layer", "rnn", "--seed", "7", "--confidence", "0.9"),
        *("--time-budget", "3", "--time-axis", "0", "--norm", "2", "--witness", "w.npz"),
        *("--exceed", "0.05"),
    )
    assert (code, err) == (0, "")
    golden = Path(by_hand.__file__).with_name("golden").joinpath("stable.txt").read_text()
    assert out == golden.rstrip() + " --time-axis 0 --batch-axis 1\n"
    ((name, models, settings),) = api.calls
    data = settings.pop("data")
    assert [x.shape for x in data.inputs[""]] == [(5, 3), (5, 3)]
    assert (name, models) == ("audit", ("m.pt",))
    assert settings == {
        "eps": 1e-2,
        "norm": "2",
        "input_range": (-1.0, 2.0),
        "layer": "rnn",
        "seed": 7,
        "confidence": 0.9,
        "exceed": 0.05,
        "pictures": False,
        "time_budget": 3.0,
        "witness": "w.npz",
        "progress": None,
    }


def test_truncate_names_its_output_after_the_model(api, capsys):
    code, out, _ = run(
        capsys, "truncate", "models/m.pt", "--evidence", "proved", "--max-depth", "9"
    )
    assert code == 0
    assert out.rstrip().endswith('session.run(None, {"x": np.zeros((100, 1, 88), np.float32)})')
    ((_, models, settings),) = api.calls
    assert models == ("models/m.pt", Path("m.truncated.onnx"))
    assert (settings["evidence"], settings["max_depth"], settings["depth"]) == ("proved", 9, None)
    assert settings["eps"] == 1e-3


def test_verify_passes_both_models(api, capsys):
    code, out, _ = run(capsys, "verify", "a.pt", "b.onnx")
    assert code == 0
    assert "PASS: the largest error 3.05e-4 is within ε = 1e-3 on 48 inputs" in out
    assert api.calls[0][1] == ("a.pt", "b.onnx")


def test_a_step_with_a_length_shows_depths_as_time(api, capsys):
    _, out, _ = run(capsys, "inspect", "m.pt", "--step-seconds", "0.01")
    assert "proved 53 (530 ms)" in out
    _, out, _ = run(capsys, "inspect", "m.pt", "--step-seconds", "0.01", "--format", "json")
    assert json.loads(out)["settings"]["step_seconds"] == 0.01


def test_how_the_data_are_read_goes_into_the_next_command(api, capsys):
    np.save("x.npy", np.zeros((5, 2, 3)))
    _, out, _ = run(capsys, "inspect", "m.pt", "--data", "x.npy", "--time-axis", "0")
    next_ = " ".join(out[out.index("next:") :].replace("\\\n", " ").split())
    assert next_.endswith("--time-axis 0")


# ----------------------------------------------------------------------- what is given back


@pytest.mark.parametrize("form", ["text", "json"])
def test_exit_codes_are_the_same_in_every_format(api, capsys, form):
    last = ("--format", form)
    for verdict in (by_hand.STABLE, by_hand.UNDECIDED, by_hand.LONGER, by_hand.NOTHING):
        api.answers["audit"] = verdict
        assert run(capsys, "inspect", "m.pt", *last)[0] == 0
    assert run(capsys, "truncate", "m.pt", *last)[0] == 0
    assert run(capsys, "verify", "a.pt", "b.onnx", *last)[0] == 0
    api.answers |= {"truncate": by_hand.TRUNCATE_FAIL, "verify": by_hand.VERIFY_NOTHING}
    assert run(capsys, "truncate", "m.pt", *last)[0] == 1
    assert run(capsys, "verify", "a.pt", "b.onnx", *last)[0] == 1
    api.answers["audit"] = UsageError("no")
    assert run(capsys, "inspect", "m.pt", *last)[0] == 2
    api.answers["audit"] = UnsupportedModelError("no")
    assert run(capsys, "inspect", "m.pt", *last)[0] == 3
    api.answers["audit"] = ZeroDivisionError("ours")
    assert run(capsys, "inspect", "m.pt", *last)[0] == 3
    api.answers["audit"] = KeyboardInterrupt()
    assert run(capsys, "inspect", "m.pt", *last)[0] == 130


def test_a_refusal_is_one_line_and_json_for_programs(api, capsys):
    api.answers["audit"] = LoadError("m.pt: wanted\na \x1b[31mmodel", help="name one", id="RA101")
    code, out, err = run(capsys, "inspect", "m.pt", "--format", "json")
    assert (code, err) == (3, "error[RA101]: m.pt: wanted a �[31mmodel; name one\n")
    refusal = json.loads(out)
    jsonschema.validate(refusal, schema())
    assert refusal["model"] == {"path": "m.pt"}
    assert refusal["error"]["id"] == "RA101"
    assert run(capsys, "inspect", "m.pt")[1] == ""


def test_our_own_fault_keeps_its_traceback(api, capsys):
    api.answers["audit"] = ZeroDivisionError("ours")
    code, out, err = run(capsys, "inspect", "m.pt", "--format", "json")
    assert code == 3
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("error[RA900]: rnnaudit itself failed")
    jsonschema.validate(json.loads(out), schema())


def test_a_report_goes_to_a_file(api, capsys):
    for form in ("text", "json"):
        code, out, err = run(capsys, "inspect", "m.pt", "--format", form, "-o", f"r.{form}")
        assert (code, out, err) == (0, "", "")
    jsonschema.validate(json.loads(Path("r.json").read_text("utf-8")), schema())
    assert "\x1b" not in Path("r.text").read_text("utf-8")


@pytest.mark.parametrize("command", [("inspect", "m"), ("truncate", "m"), ("verify", "a", "b")])
def test_an_output_that_cannot_be_written_is_refused_before_any_work(api, capsys, command):
    missing = "the output must be in a folder that exists, got nowhere/r.json; create nowhere first"
    folder = "the output must be a file, got the folder .; name a file"
    for target, words in (("nowhere/r.json", missing), (".", folder)):
        code, out, err = run(capsys, *command, "-o", target)
        assert (code, out, err) == (2, "", f"error[RA003]: {words}\n")
    assert api.calls == []


def test_a_full_disk_is_the_users_to_mend(api, capsys):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    code, _, err = run(capsys, "inspect", "m.pt", "-o", "/dev/full")
    words = "the output must be writable, got /dev/full: No space left on device"
    assert (code, err) == (2, f"error[RA003]: {words}; choose another place\n")


@pytest.mark.parametrize("command", [("inspect", "m"), ("truncate", "m"), ("verify", "a", "m")])
def test_what_is_read_is_never_written_over(api, capsys, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    Path("m").write_text("a model")
    Path("d.npy").write_text("data")
    for target in ("m", "d.npy"):
        code, out, err = run(capsys, *command, "--data", "d.npy", "-o", target)
        words = f"the output must not be what is read, got {target} for both"
        assert (code, out, err) == (2, "", f"error[RA003]: {words}; choose another name\n")
    assert (Path("m").read_text(), Path("d.npy").read_text()) == ("a model", "data")
    assert api.calls == []


def test_quiet_prints_the_verdict_only_and_verbose_everything(api, capsys):
    quiet = run(capsys, "inspect", "m.pt", "--quiet")[1]
    assert quiet.startswith("verdict: STABLE (proved for every input with |x| ≤ 1)")
    assert len(quiet.splitlines()) == 2
    assert "onnxruntime 1.32.0" in run(capsys, "inspect", "m.pt", "--verbose")[1]


@pytest.mark.parametrize("command", [("truncate", "m.pt"), ("verify", "m.pt", "m.onnx")])
def test_quiet_still_says_what_was_not_compared(command, api, capsys):
    left = ("3 inputs by the time budget of 1 s", "1 of 9 sequences of the data beyond 9 steps")
    judged = replace(by_hand.PASS, left_out=left)
    api.answers[command[0]] = replace(api.answers[command[0]], equivalence=judged)
    code, out, err = run(capsys, *command, "--quiet")
    assert (code, err) == (0, f"left out of the comparison: {'; '.join(left)}\n")
    assert out.startswith("verify:  PASS")
    assert run(capsys, *command)[2] == ""


# ---------------------------------------------------------------------------- wrong options


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inspekt"], "No such command 'inspekt' (did you mean 'inspect'?); see rnnaudit --help"),
        (["inspect"], "Missing argument 'MODEL'; see rnnaudit inspect --help"),
        (["inspect", "a", "b"], "Got unexpected extra argument"),
        (["inspect", "a", "--epz", "1"], "No such option: --epz"),
        (["inspect", "a", "--eps"], "requires an argument"),
        (
            ["inspect", "a", "--eps", "small"],
            "--eps must be a number, such as 0.001, got 'small'; see rnnaudit inspect --help",
        ),
        (["inspect", "a", "--seed", "1.5"], "--seed must be a whole number, such as 0, got '1.5'"),
        (["inspect", "a", "--time-axis", "q"], "--time-axis must be a whole number, got 'q'"),
        (["inspect", "a", "--eps", "0"], "--eps must be a finite number above 0, got 0"),
        (["inspect", "a", "--eps", "-1"], "--eps must be a finite number above 0, got -1"),
        (["inspect", "a", "--eps", "nan"], "--eps must be a finite number above 0, got nan"),
        (["inspect", "a", "--eps", "inf"], "--eps must be a finite number above 0, got inf"),
        (["truncate", "a", "--eps", "0"], "--eps must be a finite number above 0, got 0"),
        (["verify", "a", "b", "--eps", "0"], "--eps must be a finite number above 0, got 0"),
        (["inspect", "a", "--confidence", "1"], "--confidence must lie between 0 and 1, got 1"),
        (["inspect", "a", "--seed", "-1"], "--seed must be from 0 to 2⁶³ − 1, got -1"),
        (["truncate", "a", "--seed", str(2**64)], "--seed must be from 0 to 2⁶³ − 1, got 1844674"),
        (["inspect", "a", "--time-budget", "0"], "--time-budget must be a finite number above 0"),
        (["inspect", "a", "--step-seconds", "0"], "--step-seconds must be a finite number above"),
        (["inspect", "a", "--input-range", "1"], "an input range must be LO:HI"),
        (
            ["inspect", "a", "--format", "xml"],
            "--format must be one of text, json, markdown, junit, sarif, html, got 'xml'; see ",
        ),
        (["truncate", "a", "--depth", "0"], "--depth must be at least 1, got 0"),
        (["truncate", "a", "--max-depth", "0"], "--max-depth must be at least 1, got 0"),
        (
            ["truncate", "a", "--evidence", "hope"],
            "--evidence must be one of proved, measured, got 'hope'; see rnnaudit truncate --help",
        ),
        (["verify", "a"], "wanted ORIGINAL and CANDIDATE, got one of them; name both"),
        (["check", "a"], "wanted CERT and MODEL, got one of them; name both"),
    ],
)
def test_wrong_options_are_one_line_and_exit_2(api, capsys, arguments, words):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error[RA001]: ")
    assert words in err
    assert "?;" not in err
    assert len(err.splitlines()) == 1
    assert api.calls == []


def test_without_a_command_the_help_is_printed_and_the_exit_code_is_2(api, capsys):
    code, out, err = run(capsys)
    assert (code, out) == (2, "")
    assert err == run(capsys, "--help")[1]
    assert "2 wrong options or no command" in " ".join(err.split())
    assert api.calls == []


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_pattern_that_matches_nothing_says_so_and_hides_no_other_model(api, capsys, form):
    Path("m.pt").touch()
    code, out, err = run(capsys, "gate", "nothing/*.onnx", "m.pt", "--format", form)
    assert (code, err, len(api.calls)) == (3, "", 1)
    words = "a pattern that matches a file was wanted, got nothing/*.onnx, which matches none"
    assert words in " ".join(out.split())
    assert "no such file" not in out


def test_data_that_cannot_be_used_exit_3(api, capsys):
    code, _, err = run(capsys, "inspect", "m.pt", "--data", "none.npy")
    assert code == 3
    assert err.startswith(
        "error[RA107]: data must be a file, a folder or module:function, got none"
    )


# ---------------------------------------------------------------------------- configuration


def write(name, text):
    Path(name).write_text(text, "utf-8")


def test_the_configuration_sets_defaults_and_explicit_options_win(api, capsys):
    write(
        "pyproject.toml",
        '[tool.rnnaudit]\nmodel = "m.pt"\neps = 1e-2\nstep-seconds = 2\nseed = 5\nquiet = true\n'
        "[tool.rnnaudit.truncate]\nmax_depth = 77\neps = 0.5\n"
        '[tool.rnnaudit.inspect]\noutput = "report.txt"\n',
    )
    assert run(capsys, "inspect")[:2] == (0, "")
    assert len(Path("report.txt").read_text("utf-8").splitlines()) == 2
    assert run(capsys, "truncate")[0] == 0
    assert run(capsys, "truncate", "n.pt", "--eps", "1e-4")[0] == 0
    inspected, truncated, explicit = api.calls
    assert inspected[1] == ("m.pt",)
    assert (inspected[2]["eps"], inspected[2]["seed"]) == (1e-2, 5)
    assert truncated[1] == ("m.pt", Path("m.truncated.onnx"))
    assert (truncated[2]["eps"], truncated[2]["max_depth"]) == (0.5, 77)
    assert explicit[1] == ("n.pt", Path("n.truncated.onnx"))
    assert explicit[2]["eps"] == 1e-4


def test_a_configured_model_is_the_original_of_verify(api, capsys):
    write("rnnaudit.toml", 'model = "m.pt"\n')
    assert run(capsys, "verify", "out.onnx")[0] == 0
    assert run(capsys, "verify", "a.pt", "b.onnx")[0] == 0
    assert [models for _, models, _ in api.calls] == [("m.pt", "out.onnx"), ("a.pt", "b.onnx")]
    assert run(capsys, "verify")[0] == 2


def test_a_lone_argument_of_check_is_the_model_of_a_configured_proof(api, capsys):
    write("rnnaudit.toml", '[check]\ncertificate = "m.proof.json"\n')
    assert run(capsys, "check", "m.pt")[0] == 0
    assert run(capsys, "check", "n.proof.json", "n.pt")[0] == 0
    assert [models for _, models, _ in api.calls] == [
        (Path("m.proof.json"), "m.pt"),
        (Path("n.proof.json"), "n.pt"),
    ]
    code, _, err = run(capsys, "check")
    assert (code, err.count("wanted CERT and MODEL, got one of them; name both")) == (2, 1)


def test_rnnaudit_toml_comes_before_pyproject(api, capsys):
    write("rnnaudit.toml", 'model = "mine.pt"\n')
    write("pyproject.toml", '[tool.rnnaudit]\nmodel = "theirs.pt"\n')
    assert run(capsys, "inspect")[0] == 0
    assert api.calls[0][1] == ("mine.pt",)


def test_a_pyproject_of_another_tool_says_nothing(api, capsys):
    write("pyproject.toml", "[tool.other]\neps = 3\n")
    assert run(capsys, "inspect", "m.pt")[0] == 0
    assert api.calls[0][2]["eps"] == 1e-3


def test_every_option_can_be_configured():
    import typer

    keys = app._parameters(typer.main.get_command(app.app))
    assert set(keys) == set(COMMANDS)
    assert keys["explain"] == {}
    assert {"model", "output", "format", "eps", "data", "seed"} <= set(keys["inspect"])
    for command, names in keys.items():
        assert "help" not in names
        assert ("model" in names) == (command != "explain")


def test_lists_and_tables_of_the_configuration_are_options_given_again(api, capsys):
    write(
        "pyproject.toml",
        """
        [tool.rnnaudit.gate]
        model = ["a.pt", "b.pt"]
        fail-on = "warning"
        allow-skipped = true

        [[tool.rnnaudit.gate.allow]]
        id = "RA203"
        until = 2999-12-31
        reason = "few: on purpose"

        [[tool.rnnaudit.gate.allow]]
        id = "RA205"
        until = 2999-12-31
        reason = "none yet"
        """,
    )
    api.answers["audit"] = replace(
        by_hand.UNDECIDED, verdict="stable", skipped=by_hand.SKIPPED.skipped
    )
    code, out, err = run(capsys, "gate", "--format", "json")
    assert (code, err) == (0, "")
    assert [models for _, models, _ in api.calls] == [("a.pt",), ("b.pt",)]
    rules = json.loads(out)["reports"][0]["gate"]["rules"]
    (got,) = [rule["got"] for rule in rules if rule["rule"] == "finding RA203"]
    assert got.endswith("(allowed until 2999-12-31: few: on purpose)")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epz = 1", "rnnaudit.toml: a key must be one of allow, "),
        ("max_dpth = 1", "got 'max_dpth'; did you mean max-depth?"),
        ("help = true", "got 'help'"),
        ("[gait]\nx = 1", "got 'gait'"),
        ("[gate]\nx = 1", "rnnaudit.toml, [gate]: a key must be one of"),
        ("[gate]\nallow = [{id = 1}]", "a table must have the keys id, until, reason, got {'id'"),
        ("[truncate]\nconfidenze = 1", "rnnaudit.toml, [truncate]: a key must be one of"),
        ("[verify]\nmax-depth = 1", "got 'max-depth'"),
        ('output = "x"', "output names another file for every command"),
        ("eps = [1]", "rnnaudit.toml: eps must be a number or a string, got [1]"),
        ("eps = ", "rnnaudit.toml must be readable TOML, got: "),
        ("eps = true", "must be a number or a string, got True"),
        ("quiet = 1", "must be true or false, got 1"),
    ],
)
def test_a_configuration_that_means_nothing_is_one_line(api, capsys, text, words):
    write("rnnaudit.toml", text)
    code, out, err = run(capsys, "inspect", "m.pt")
    assert (code, out) == (2, "")
    assert err.startswith("error[RA002]: ")
    assert words in err
    assert len(err.splitlines()) == 1


def test_a_value_that_does_not_fit_names_the_file(api, capsys):
    write("rnnaudit.toml", 'eps = "small"')
    code, _, err = run(capsys, "inspect", "m.pt")
    assert code == 2
    assert "--eps must be a number, such as 0.001, got 'small' (set by rnnaudit.toml); see" in err


def test_a_table_that_is_none_is_refused(tmp_path):
    (tmp_path / "pyproject.toml").write_text("tool = 1")
    with pytest.raises(UsageError, match=r"pyproject\.toml: tool must be a table, got 1"):
        config.defaults({}, tmp_path)


# --------------------------------------------------------------------------------- help


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_has_examples_and_fits_80_columns(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    code, out, err = run(capsys, *([command] if command else []), "--help")
    assert (code, err) == (0, "")
    assert max(map(cell_len, out.splitlines())) <= 80
    examples = out[out.index("Examples:") :]
    assert examples.count(f"rnnaudit {command}") >= 2
    if not command:
        assert all(name in out for name in COMMANDS)
        assert "[tool.rnnaudit]" in out


@pytest.mark.parametrize("command", [[], ["gate"]])
def test_exit_codes_in_the_help_are_one_paragraph(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(capsys, *command, "--help")
    paragraph = out[out.index("Exit codes") :].partition("\n  ")[0].split("\n")
    assert all(len(line.rstrip()) > 65 for line in paragraph[:-1])


def test_examples_in_the_help_are_ones_the_program_takes(api, capsys):
    np.savez("sequences.npz", x=np.zeros((3, 2)))
    Path("models").mkdir()
    Path("models/a.onnx").touch()
    texts = [app.EXAMPLES, *(examples for _, examples in app.COMMANDS)]
    Path("baseline.json").write_text(JsonRenderer().render(by_hand.STABLE))
    lines = [line.partition("|")[0] for text in texts for line in text.splitlines()]
    commands = [shlex.split(line) for line in lines if line.strip().startswith("rnnaudit ")]
    assert len(commands) >= 9
    for words in commands:
        assert run(capsys, *words[1:])[0] == 0, words


def test_the_version_is_the_packages(capsys):
    assert run(capsys, "--version") == (0, f"rnnaudit {rnnaudit.__version__}\n", "")


def test_every_format_has_a_renderer():
    assert [form.value for form in choices.Format] == [renderer.name for renderer in RENDERERS]


def test_help_imports_nothing_slow():
    code = (
        "import sys\nfrom rnnaudit.cli.app import main\nmain(['--help'])\n"
        f"print([m for m in {SLOW} if m in sys.modules], file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stderr == "[]\n"


@pytest.mark.skipif(not hasattr(os, "wait4"), reason="needs the CPU time of a child")
def test_help_takes_under_half_a_second_of_work():
    def work():
        child = subprocess.Popen(
            [sys.executable, "-m", "rnnaudit", "--help"], stdout=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        assert child.returncode == 0
        return usage.ru_utime + usage.ru_stime

    assert statistics.median(work() for _ in range(3)) < 0.5


# --------------------------------------------------------------------------- as a process


def test_the_module_runs_as_a_program():
    assert program("--version").stdout == f"rnnaudit {rnnaudit.__version__}\n"
    wrong = program("inspect", "--epz")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "Traceback" not in wrong.stderr


LEAVING = """
from rnnaudit.cli.output import write
for _ in range(20):
    write("a long report\\n" * 10_000)
"""
REPORTING = """
import sys
from rnnaudit.cli.output import emit
from rnnaudit.cli.choices import Format
from tests import reports_by_hand
emit(reports_by_hand.STABLE, Format(sys.argv[1]), quiet=False, verbose=False)
"""
ROOT = Path(__file__).parents[1]


def test_a_reader_that_leaves_is_no_error():
    child = subprocess.Popen(
        [sys.executable, "-c", LEAVING],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    child.stdout.readline()
    child.stdout.close()
    assert child.stderr.read() == b""
    child.stderr.close()
    assert child.wait() == 0


def test_a_full_disk_behind_stdout_is_the_users_to_mend():
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    code = "from rnnaudit.cli import app, output\napp._help = lambda: output.write('x')\n"
    with Path("/dev/full").open("w") as full:
        child = subprocess.run(
            [sys.executable, "-c", f"{code}import sys; sys.exit(app.main([]))"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            check=False,
        )
    words = "the output must be writable, and stdout is not: No space left on device"
    assert (child.returncode, child.stderr) == (
        2,
        f"error[RA003]: {words}; send it to another place\n",
    )


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_the_exit_code_does_not_depend_on_which_streams_are_open(closed):
    shell = shutil.which("sh")
    if shell is None:
        pytest.skip("no sh here")
    code = "import sys; from rnnaudit.cli import app; sys.exit(app.main(sys.argv[1:]))"
    for arguments, wanted in ((["explain", "RA121"], 0), (["inspect", "missing.pt"], 3), ([], 2)):
        child = subprocess.run(
            [shell, "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )
        assert child.returncode == wanted, child.stderr
        assert "Traceback" not in child.stderr


def test_an_ascii_terminal_gets_escapes_not_a_crash(api):
    code = f"from rnnaudit.cli import app\napp.main(['--version'])\n{REPORTING}"
    for form in ("text", "json"):
        result = subprocess.run(
            [sys.executable, "-c", code, form],
            capture_output=True,
            check=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        )
        text = result.stdout.decode("ascii")
        if form == "json":
            jsonschema.validate(json.loads(text.partition("\n")[2]), schema())


def on_a_terminal(code, **environment):
    """Run Python code with stdout and stderr on a pseudo-terminal; return what it showed."""
    ours, theirs = pytest.importorskip("pty").openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", code, "text"],
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm-256color", **environment},
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(ours)
    assert child.wait() == 0
    return shown.decode()


def test_colour_appears_on_a_terminal_only(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "CI", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)
    assert "\x1b[1;32mSTABLE" in on_a_terminal(REPORTING)
    assert "\x1b" not in on_a_terminal(REPORTING, NO_COLOR="1")
    assert "\x1b" not in on_a_terminal(REPORTING, TERM="dumb")
    piped = subprocess.run(
        [sys.executable, "-c", REPORTING, "text"], capture_output=True, cwd=ROOT, check=True
    )
    assert b"\x1b" not in piped.stdout


def test_progress_is_shown_on_a_terminal_only(capsys):
    code = (
        "from rnnaudit.cli.output import progress\n"
        "with progress(quiet={quiet}) as show:\n"
        "    if show is not None:\n"
        "        show('measuring rnn[0]', 0.5)\n"
        "print('done')"
    )
    assert "measuring rnn[0]" in on_a_terminal(code.format(quiet=False))
    assert "measuring" not in on_a_terminal(code.format(quiet=True))
    piped = subprocess.run(
        [sys.executable, "-c", code.format(quiet=False)], capture_output=True, cwd=ROOT, check=True
    )
    assert (piped.stdout, piped.stderr) == (b"done\n", b"")


# ---------------------------------------------------------------------- the whole program


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A contracting RNN of four units in ``tiny.pt``, in the working folder."""
    import torch

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    module = torch.nn.RNN(2, 4)
    with torch.no_grad():
        module.weight_hh_l0 *= 0.5 / torch.linalg.matrix_norm(module.weight_hh_l0, 2)
    torch.save(module.state_dict(), "tiny.pt")
    return module


def test_a_model_is_inspected_truncated_and_verified(tiny, capsys):
    code, out, _ = run(capsys, "inspect", "tiny.pt", "--format", "json")
    assert code == 0
    found = json.loads(out)
    jsonschema.validate(found, schema())
    assert found["verdict"] == "stable"
    assert found["depth"]["proved"] >= 1

    code, out, _ = run(capsys, "truncate", "tiny.pt", "--eps", "1e-3")
    assert code == 0
    assert "PASS: the largest error" in out
    snippet = [line.removeprefix("    ") for line in out.partition("run it:\n")[2].splitlines()]
    assert len(snippet) == 3
    script = "\n".join([*snippet, "print(y.shape[-1])"])
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "4\n"

    assert run(capsys, "verify", "tiny.pt", "tiny.truncated.onnx", "--eps", "1e-3")[0] == 0
    code, out, _ = run(
        capsys, "truncate", "tiny.pt", "--depth", "1", "-o", "one.onnx", "--format", "json"
    )
    assert code == 1
    found = json.loads(out)
    jsonschema.validate(found, schema())
    assert found["equivalence"]["required_eps"] > 1e-3
    assert found["export"]["truncations"][0] == {
        "recurrence": found["recurrences"][0]["label"],
        "depth": 1,
        "evidence": "chosen",
    }


def test_the_same_seed_gives_the_same_bytes(tiny, capsys):
    arguments = ("inspect", "tiny.pt", "--format", "json", "--seed", "3")
    assert run(capsys, *arguments) == run(capsys, *arguments)


def test_a_file_that_is_no_model_is_one_line_and_nothing_is_written(tiny, capsys):
    import torch

    Path("empty.pt").touch()
    Path("text.pt").write_text("hello")
    torch.save({"weight": torch.zeros(2, 2)}, "dense.pt")
    poisoned = tiny.state_dict()
    poisoned["weight_hh_l0"][0, 0] = float("nan")
    torch.save(poisoned, "nan.pt")
    before = sorted(Path().iterdir())
    for name in ("missing.pt", "empty.pt", "text.pt", "dense.pt", "nan.pt", "."):
        for command in ("inspect", "truncate"):
            code, out, err = run(capsys, command, name, "--format", "json")
            assert (name, code) == (name, 3)
            assert err.startswith("error[RA1")
            assert len(err.splitlines()) == 1
            jsonschema.validate(json.loads(out), schema())
    assert sorted(Path().iterdir()) == before


def test_data_of_another_width_are_refused(tiny, capsys):
    np.save("wide.npy", np.zeros((5, 3)))
    code, _, err = run(capsys, "inspect", "tiny.pt", "--data", "wide.npy")
    assert code == 3
    assert err.startswith("error[RA107]: ")
    assert "got 3" in err
