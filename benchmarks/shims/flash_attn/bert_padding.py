"""transformers imports these names; inputs that are packed already need neither."""

from typing import NoReturn


def pad_input(*args: object, **options: object) -> NoReturn:
    """Padded inputs are not served here."""
    raise NotImplementedError("padded inputs are not served by this shim: measure them with SDPA")


def unpad_input(*args: object, **options: object) -> NoReturn:
    """Padded inputs are not served here."""
    raise NotImplementedError("padded inputs are not served by this shim: measure them with SDPA")
