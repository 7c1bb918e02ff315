"""The one error a user can cause."""


class InputError(ValueError):
    """Bad input: its message is one clear line that names file, key and value.

    The command line prints it to stderr and exits with code 2. Code that finds the
    *caller* at fault raises ValueError; a broken law of the simulation is a RuntimeError.
    """
