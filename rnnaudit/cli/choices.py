"""What an option that names one of a few things can name."""

from __future__ import annotations

from enum import StrEnum


class Format(StrEnum):
    """The form of a report: the name of a renderer."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"
    JUNIT = "junit"
    SARIF = "sarif"
    HTML = "html"


class ProofFormat(StrEnum):
    """The form in which a proof file is reported."""

    TEXT = "text"
    JSON = "json"


class Norm(StrEnum):
    """How the error over output units is counted."""

    MAX = "max"
    TWO = "2"


class Form(StrEnum):
    """How a truncated layer is written."""

    AUTO = "auto"
    WINDOW = "window"
    CHUNK = "chunk"
    LAST = "last"
    FILTER = "filter"


class Evidence(StrEnum):
    """What a truncation's depth rests on: a proof and nothing weaker, or measurements alone."""

    PROVED = "proved"
    MEASURED = "measured"


class Require(StrEnum):
    """The verdict that a gate asks for."""

    STABLE = "stable"
    NOT_UNSTABLE = "not-unstable"
    ANY = "any"


class GateEvidence(StrEnum):
    """The weakest evidence on which a gate accepts a depth."""

    PROVED = "proved"
    MEASURED = "measured"
    ANY = "any"


class FailOn(StrEnum):
    """The mildest findings that fail a gate."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"
    NEVER = "never"
