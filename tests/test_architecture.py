"""The house stands: a module imports only from floors below its own, and only cli/ speaks."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rnnaudit
from rnnaudit.findings import FINDINGS, finding, known

PACKAGE = Path(rnnaudit.__file__).parent

FLOORS = {
    room: floor
    for floor, rooms in enumerate(
        (
            ("results", "errors", "findings", "threads", "versions"),
            ("model", "reports", "arguments"),
            ("cells", "norms", "runtime", "runtime_child", "data", "policy"),
            ("certificates", "estimators", "loaders"),
            ("depth", "verification", "checking", "modules"),
            ("truncation", "observe", "evidence", "budget"),
            ("export", "examine"),
            ("planning", "refutation", "proving", "effects", "conversion", "deviations"),
            ("assembly", "trial", "replaying", "swap"),
            ("api",),
            ("integrations",),
            ("cli", "pytest"),
            ("__main__",),
        )
    )
    for room in rooms
}
"""A room is a module or a folder of the package. ``rnnaudit`` itself is the door: below all."""

SAME_FLOOR = {("findings", "results")}
"""The registry of findings makes records of them, and both lie at the very bottom."""

SLOW = ("torch", "onnx", "onnx_ir", "scipy", "onnxruntime")
MODULES = sorted(PACKAGE.rglob("*.py"))


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def name(path):
    return str(path.relative_to(PACKAGE))


def is_module(parts):
    path = PACKAGE.joinpath(*parts)
    return path.is_dir() or path.with_suffix(".py").is_file()


def imports(tree):
    """Yield the path inside the package, as parts, of everything imported from it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            first, *parts = target.split(".")
            if first == "rnnaudit" and parts and is_module(parts[:1]):
                yield parts


def trees():
    return [
        pytest.param(path, ast.parse(path.read_text("utf-8")), id=name(path)) for path in MODULES
    ]


def test_no_floor_is_kept_for_a_room_that_is_gone():
    assert set(FLOORS) - {room(path) for path in MODULES} == set()


@pytest.mark.parametrize(("path", "tree"), trees())
def test_a_module_imports_from_floors_below_only(path, tree):
    own = room(path)
    if own == "__init__":
        return  # the door opens to the public API, on first use
    assert own in FLOORS, f"{own} has no floor: give it one in FLOORS"
    for parts in imports(tree):
        other = parts[0]
        if other == own or (own, other) in SAME_FLOOR:
            continue
        assert FLOORS[other] < FLOORS[own], f"{name(path)} (floor {FLOORS[own]}) imports {other}"


SPEECH = {"print", "input", "breakpoint", "exit", "quit"}
ENVIRONMENT = {
    ("sys", "exit"),
    ("sys", "argv"),
    ("sys", "stdout"),
    ("sys", "stderr"),
    ("os", "environ"),
    ("os", "getenv"),
    ("os", "_exit"),
    ("os", "abort"),
}
CHILD = {("sys", "argv")}
"""What a child process of ours may read: the folder through which its parent speaks to it."""


@pytest.mark.parametrize(("path", "tree"), trees())
def test_only_the_command_line_prints_exits_and_reads_the_environment(path, tree):
    if room(path) in ("cli", "__main__"):
        return
    allowed = CHILD if room(path) == "runtime_child" else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in SPEECH, f"{name(path)}:{node.lineno} calls {node.func.id}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used = (node.value.id, node.attr)
            assert used not in ENVIRONMENT - allowed, f"{name(path)}:{node.lineno} uses {used}"


@pytest.mark.parametrize(("path", "tree"), trees())
def test_every_module_says_its_idea_first(path, tree):
    docstring = ast.get_docstring(tree)
    assert docstring, f"{name(path)} has no docstring"
    assert "TODO" not in path.read_text("utf-8"), name(path)


@pytest.mark.parametrize(
    "module",
    [
        "rnnaudit",
        "rnnaudit.results",
        "rnnaudit.errors",
        "rnnaudit.findings",
        "rnnaudit.versions",
        "rnnaudit.reports",
        "rnnaudit.policy",
        "rnnaudit.cli.app",
        "rnnaudit.data",
        "rnnaudit.pytest",
        "rnnaudit.integrations.metrics",
        "rnnaudit.integrations.watching",
    ],
)
def test_what_must_start_fast_imports_nothing_slow(module):
    code = f"import sys, {module}\nprint([m for m in {SLOW} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_the_public_names_are_there_and_typed():
    assert (PACKAGE / "py.typed").exists()
    for public in ("load", "audit", "truncate", "verify", "replay", "certify", "check"):
        assert callable(getattr(rnnaudit, public))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = rnnaudit.nothing


# ---------------------------------------------------------------------------- findings


def used_ids():
    """Collect the ids that the sources hold as strings, by place."""
    for path in MODULES:
        if room(path) == "findings":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and re.fullmatch(r"RA\d{3}", text):
                yield name(path), text


def test_every_id_that_is_raised_is_registered():
    registered = {entry.id for entry in FINDINGS}
    assert {(place, id_) for place, id_ in used_ids() if id_ not in registered} == set()


def test_every_registered_id_is_raised_somewhere():
    assert {entry.id for entry in FINDINGS} - {id_ for _, id_ in used_ids()} == set()


def test_ids_are_unique_ordered_and_explained():
    ids = [entry.id for entry in FINDINGS]
    assert ids == sorted(set(ids))
    for entry in FINDINGS:
        assert re.fullmatch(r"RA[0-39]\d\d", entry.id)
        assert entry.title
        assert not entry.title.endswith(".")
        assert entry.help, entry.id
        assert known(entry.id) is entry


@pytest.mark.parametrize(("path", "tree"), trees())
def test_findings_are_made_by_the_registry_only(path, tree):
    if room(path) == "findings":
        return
    for node in ast.walk(tree):
        made = isinstance(node, ast.Call) and getattr(node.func, "id", None) == "Finding"
        assert not made, f"{name(path)}:{node.lineno} makes a Finding; call findings.finding"


def test_a_finding_takes_severity_and_help_from_its_registration():
    made = finding("RA205", "inputs", "made up")
    assert (made.severity, made.help) == known("RA205")[1::2]
    with pytest.raises(KeyError):
        known("RA999")
