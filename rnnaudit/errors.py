"""What a user can mend: each error says what was wanted, what came and what to do."""

from __future__ import annotations


class RnnauditError(Exception):
    """A fact about the input that the user can mend; printed as one line, without a traceback.

    Attributes:
        id: The finding's stable identity (``RA…``).
        help: What to do about it.
        exit_code: 2 for usage, 3 for a file that cannot be audited.
    """

    exit_code = 3
    default_id = "RA100"

    def __init__(self, message: str, *, help: str = "", id: str | None = None) -> None:  # noqa: A002
        """Keep the message, what to do about it, and the finding's identity."""
        super().__init__(message)
        self.help = help
        self.id = id or self.default_id

    def __str__(self) -> str:
        """Return one line: the message, then what to do."""
        message = " ".join(str(self.args[0]).split())
        return f"{message}; {self.help}" if self.help else message


class UsageError(RnnauditError):
    """An option's value makes no sense, whatever the file."""

    exit_code = 2
    default_id = "RA001"


class LoadError(RnnauditError):
    """The file is missing, damaged, hostile, or of a kind that is not read."""

    default_id = "RA101"


class UnsupportedModelError(RnnauditError):
    """The file was read, and holds something that cannot be audited honestly."""

    default_id = "RA102"


class RnnauditWarning(UserWarning):
    """A finding, or a part that was skipped, that goes with a result and does not show in it."""
