"""The one exception that reaches a user as one clear line and exit status 2, and a command line that raises it."""

from __future__ import annotations

import argparse
from typing import NoReturn


class UserError(Exception):
    """A mistake that the user can mend.

    The message is one line that says what is wrong, where, what was expected and what to do;
    `main` prints it on standard error without a traceback and exits with status 2.

        raise UserError("configs: train.steps is 0; at least 1 step is needed; set config.train.steps")
    """


class Parser(argparse.ArgumentParser):
    """One line and no usage text where the command line is wrong."""

    def error(self, message: str) -> NoReturn:
        """Raises UserError."""
        raise UserError(f"command line: {message}; {self.prog} --help shows what is known")
