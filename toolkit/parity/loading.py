"""How transformers loads a reference model: without a word, and with which of its implementations."""

import contextlib
from collections.abc import Iterator

__all__ = ["flash_attentions", "implementations", "quiet"]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Loading a reference must not draw progress bars and load reports over ours."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def implementations(attention: str) -> dict[str, str]:
    """Options of loading: this attention; beside the plain one experts one by one, which take every dtype and size."""
    experts = {"experts_implementation": "eager"} if attention == "eager" else {}
    return {"attn_implementation": attention, **experts}


def flash_attentions() -> list[str]:
    """The names that transformers has for the flash attentions that are installed."""
    from transformers.utils import import_utils

    available = {
        "flash_attention_3": getattr(import_utils, "is_flash_attn_3_available", lambda: False),
        "flash_attention_2": import_utils.is_flash_attn_2_available,
    }
    return [name for name, there in available.items() if there()]
