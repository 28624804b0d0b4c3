"""The exceptions that this package raises.

AmpError
├── AmpValueError   (also a ValueError)   a value that can't work: an unknown dtype, a rule that matches nothing
└── AmpTypeError    (also a TypeError)    the wrong kind of thing: a module where a function is due

Every message names the argument, the value that came, and what to do.
"""


class AmpError(Exception):
    """Root of every error that amp_jax raises on purpose.

    >>> import amp_jax as amp
    >>> try:
    ...     amp.get_policy("bfloat61")
    ... except amp.AmpError as error:
    ...     print(type(error).__name__)
    AmpValueError
    """


class AmpValueError(AmpError, ValueError):
    """An argument has a value that can't work."""


class AmpTypeError(AmpError, TypeError):
    """An argument is of a kind that can't work."""
