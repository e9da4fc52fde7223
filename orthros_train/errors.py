"""The error that every command turns into one clear line and exit code 2."""


class InputError(Exception):
    """The user's input is wrong; the message says what, where, and the remedy in one line."""
