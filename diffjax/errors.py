"""The ways a verb ends other than well: each exception here is one exit code of the command line."""


class UserError(Exception):
    """The user's input is wrong: one sentence naming the file, key or value and what would be right. Exit code 2."""


class UnsupportedKernel(UserError, ValueError):
    """The kernel that was named does not exist or cannot run this shape."""


class GuardStop(Exception):
    """The guard saw too many bad steps in a row; the last good state is saved. Exit code 4."""


class Preempted(Exception):
    """The run was asked to stop; its state is saved and the same command continues it. Exit code 75."""
