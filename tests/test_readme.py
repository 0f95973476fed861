"""README and docs show what the program prints, and speak of what there is."""

import re
import shlex

import pytest
import typer

from rnnaudit.cli.app import app
from tests.readme import PAGES, README, ROOT, Tour, exchanges, fences, is_run, replayed, steady

PROGRAM = typer.main.get_command(app)
OPTIONS = {
    name: {option for parameter in command.params for option in parameter.opts}
    | {option for parameter in command.params for option in parameter.secondary_opts}
    | {"--help"}
    for name, command in PROGRAM.commands.items()
}
PROGRAMS = {option for parameter in PROGRAM.params for option in parameter.opts} | {
    "--help",
    "--install-completion",
    "--show-completion",
}
FOREIGN = {"--junitxml"}
"""Options of other programs that pages speak of."""
named = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def shown(page):
    return [exchange for fence in fences(page) if is_run(fence) for exchange in exchanges(fence)]


def cheap(exchange):
    return bool(re.match(r"rnnaudit (explain|--version)\b", exchange.command))


CHEAP = sorted({exchange for page in PAGES for exchange in shown(page) if cheap(exchange)}, key=str)


@pytest.mark.parametrize("exchange", [shown(README)[0], *CHEAP], ids=lambda e: e.command[:40])
def test_a_command_prints_what_the_page_shows(exchange, tmp_path):
    assert steady(Tour(tmp_path).run(exchange.command)) == steady(exchange.shown)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if shown(page)], ids=lambda p: p.stem)
def test_the_tour_of_a_page_prints_what_it_shows(page, tmp_path):
    for fence, printed in replayed(page, tmp_path):
        for exchange, output in zip(exchanges(fence), printed, strict=True):
            assert steady(output) == steady(exchange.shown), exchange.command


@named
def test_every_command_in_a_console_is_one_that_the_program_takes(page):
    for exchange in (exchange for fence in fences(page) for exchange in exchanges(fence)):
        for part in re.split(r" [|;&]+ ", exchange.command.replace("\\\n", " ")):
            program, *arguments = shlex.split(part)
            if program == "rnnaudit":
                name, *rest = arguments
                command = PROGRAM.commands.get(name, PROGRAM)
                command.make_context(name, rest if name in PROGRAM.commands else arguments)


@named
def test_every_option_in_prose_is_one_that_a_command_has(page):
    prose = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`([^`\n]+)`", prose):
        words = re.findall(r"(?<!\S)(?:--[a-z][a-z-]*|rnnaudit\s+[a-z]+)", code)
        commands = [word.split()[1] for word in words if word.startswith("rnnaudit")]
        assert set(commands) <= set(OPTIONS), code
        known = OPTIONS[commands[0]] if commands else set().union(PROGRAMS, *OPTIONS.values())
        if re.match(r"(rnnaudit|--)", code):
            assert {word for word in words if word.startswith("--")} <= known | FOREIGN, code


@named
def test_every_python_block_compiles(page):
    for fence in fences(page):
        if fence["language"] == "python":
            compile(fence["text"], str(page), "exec")


def test_the_first_screen_shows_a_command_and_its_verdict():
    first = README.read_text("utf-8").splitlines()[:40]
    assert any(line.startswith("$ rnnaudit inspect") for line in first)
    assert any(line.startswith("verdict:") for line in first)


def test_the_demo_runs_what_the_readme_shows_first():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    demo = [line.split("BIN)/")[1] for line in makefile.splitlines() if "$(BIN)/rnnaudit " in line]
    assert demo == [exchange.command for exchange in shown(README)[:2]]
