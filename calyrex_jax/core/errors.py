"""The one exception that reaches a user as one clear line and exit status 2."""


class UserError(Exception):
    """A mistake that the user can mend.

    The message is one line that says what is wrong, where, what was expected and what to do;
    `main` prints it on standard error without a traceback and exits with status 2.

        raise UserError("configs: train.steps is 0; at least 1 step is needed; set config.train.steps")
    """
