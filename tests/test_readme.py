"""The README shows what the program prints, and speaks of what there is."""

import re

import pytest

from tests.readme import README, ROOT, blocks, run, steady


@pytest.mark.parametrize(("arguments", "shown"), blocks(), ids=lambda text: text.split()[0])
def test_the_readme_shows_the_real_output(arguments, shown):
    assert steady(run(arguments)).strip() == steady(shown).strip()


def test_the_first_screen_shows_a_command_and_its_verdict():
    first = README.read_text("utf-8").splitlines()[:40]
    assert any(line.startswith("$ rnnaudit inspect") for line in first)
    assert any(line.startswith("verdict:") for line in first)


def test_every_link_to_a_file_leads_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README.read_text("utf-8"))
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_demo_runs_what_the_readme_shows():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    demo = [
        line.split("/rnnaudit ")[1] for line in makefile.splitlines() if "BIN)/rnnaudit" in line
    ]
    assert demo == [arguments for arguments, _ in blocks()]
