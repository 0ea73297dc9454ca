"""The ways a verb ends other than well: each exception here is one exit code of the command line."""


class UserError(Exception):
    """The user's input is wrong: one sentence naming the file, key or value and what would be right. Exit code 2."""


class StuckSave(UserError):
    """The storage did not answer in time. The thread that waits for it would keep the interpreter from leaving."""


class UnsupportedKernel(UserError, ValueError):
    """The kernel that was named does not exist or cannot run this shape."""


class StoppedEarly(Exception):
    """A run ended before its last step. Where a state was saved, `step` and `tokens_seen` are those of that state."""

    def __init__(self, text: str, step: int | None = None, tokens_seen: int = 0):
        super().__init__(text)
        self.step, self.tokens_seen = step, tokens_seen


class GuardStop(StoppedEarly):
    """The guard saw too many bad steps in a row; the last good state is saved. Exit code 4."""


class Preempted(StoppedEarly):
    """The run was asked to stop; its state is saved and the same command continues it. Exit code 75."""


EXIT_CODES = {UserError: 2, GuardStop: 4, Preempted: 75, KeyboardInterrupt: 130}


def exit_code(error: BaseException) -> int:
    """What the command line makes of an exception; 1 for what no user is meant to see."""
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)
