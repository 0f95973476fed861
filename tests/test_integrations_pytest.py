"""The pytest plugin passes what is proved stable, and a failure explains itself."""

import subprocess
import sys
import xml.etree.ElementTree as ET
from importlib.metadata import entry_points

import pytest
import torch
from torch import nn

from rnnaudit.errors import UnsupportedModelError
from rnnaudit.policy import Policy
from rnnaudit.pytest import assert_stable

SLOW = ("torch", "onnx", "onnx_ir", "scipy", "onnxruntime", "rnnaudit.api", "rnnaudit.policy")


def rnn(gain):
    torch.manual_seed(0)
    made = nn.RNN(1, 2)
    with torch.no_grad():
        made.weight_hh_l0.copy_(gain * torch.eye(2))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a project whose tests use the fixture on a calm model and on a loud one."""
    folder = tmp_path_factory.mktemp("project")
    for name, gain in (("calm", 0.2), ("loud", 3.0)):
        torch.save(rnn(gain).state_dict(), folder / f"{name}.pt")
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_models.py").write_text(
        "def test_calm(assert_stable):\n"
        "    assert assert_stable('calm.pt', eps=0.1).verdict == 'stable'\n\n"
        "def test_loud(assert_stable):\n"
        "    assert_stable('loud.pt', eps=0.1)\n"
    )
    (folder / "test_nothing.py").write_text(
        "import sys\n\n"
        "def test_nothing():\n"
        f"    assert [m for m in {SLOW} if m in sys.modules] == []\n"
    )
    return folder


def pytest_in(folder, *arguments):
    loaded = any(e.value == "rnnaudit.pytest" for e in entry_points(group="pytest11"))
    plugin = [] if loaded else ["-p", "rnnaudit.pytest"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *plugin, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_project_uses_the_fixture_and_reads_why_a_model_fails(folder):
    done = pytest_in(folder, "-W", "error", "test_models.py", "--junitxml=junit.xml")
    assert (done.returncode, done.stderr) == (1, "")
    assert "1 failed, 1 passed" in done.stdout
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("E  ")]
    assert "loud.pt fails its gate" in said
    for part in ("λ", "k(1e-1)", "wanted stable", "next:"):
        assert part in said
    assert "rnnaudit/pytest.py" not in done.stdout
    calm, loud = ET.parse(folder / "junit.xml").iter("testcase")
    numbers = {p.get("name"): float(p.get("value")) for p in calm.iter("property")}
    assert numbers["rnnaudit/lambda_proved"] < 1
    assert numbers["rnnaudit/k_proved"] >= 1
    assert {p.get("name") for p in loud.iter("property")} >= {"rnnaudit/lambda_found"}


def test_a_run_without_models_imports_nothing_slow(folder):
    done = pytest_in(folder, "test_nothing.py")
    assert done.returncode == 0, done.stdout


def test_a_live_module_passes_and_gives_its_report():
    module = rnn(0.2).train()
    report = assert_stable(module, eps=0.1)
    assert (report.verdict, report.gate.passed, module.training) == ("stable", True, True)


def test_a_policy_replaces_the_proof_by_what_the_data_show():
    data = torch.zeros(4, 24, 1)
    policy = Policy(require="any", max_depth=1, evidence="measured")
    with pytest.raises(AssertionError, match=r"max-depth: wanted k\(1e-1\) ≤ 1 .* got .*measured"):
        assert_stable(rnn(0.9), eps=0.1, data=data + torch.rand(4, 24, 1), policy=policy)


def test_what_cannot_be_audited_is_an_error_and_no_failure():
    with pytest.raises(UnsupportedModelError, match="no recurrence in Linear"):
        assert_stable(nn.Linear(1, 1))
