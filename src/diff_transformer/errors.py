"""The one exception for a mistake that a user can correct."""


class UserError(ValueError):
    """A request that cannot be carried out; the message says what was given, what is accepted and what to do.

    The command line prints the message alone. Any other exception is a bug and keeps its traceback.
    """
