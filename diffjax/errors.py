"""The ways a verb ends other than well: each exception here is one exit code of the command line."""


class UserError(Exception):
    """The user's input is wrong: one sentence naming the file, key or value and what would be right. Exit code 2."""


class UnsupportedKernel(UserError, ValueError):
    """The kernel that was named does not exist or cannot run this shape."""


class GuardStop(Exception):
    """The guard saw too many bad steps in a row; the last good state is saved. Exit code 4."""

    def __init__(self, text: str, step: int | None = None):
        super().__init__(text)
        self.step = step


class Preempted(Exception):
    """The run was asked to stop; its state is saved and the same command continues it. Exit code 75."""

    def __init__(self, text: str, step: int | None = None):
        super().__init__(text)
        self.step = step


EXIT_CODES = {UserError: 2, GuardStop: 4, Preempted: 75, KeyboardInterrupt: 130}


def exit_code(error: BaseException) -> int:
    """What the command line makes of an exception; 1 for what no user is meant to see."""
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)
