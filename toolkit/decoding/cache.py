"""How large the key/value cache is, and how requests share it."""

from dataclasses import dataclass

import torch

from toolkit.errors import InputError, UnsupportedError
from toolkit.spec import EncoderSpec

__all__ = ["CacheOptions", "bytes_per_page", "count_pages"]

_CPU_BYTES = 2**30


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """How requests share the key/value cache.

    Attributes:
        page: tokens of a page.
        pages: how many there are; None for as many as `memory` allows.
        memory: the share of a CUDA device's free memory that goes to the cache. On a CPU it is at most 1 GiB.
        requests: at most so many run at once; None for 256 on CUDA and 16 on a CPU.
        chunked_prefill: whether a long prompt may be spread over several steps, between the tokens of other requests.
        prefix_caching: whether requests share the pages of what they begin with.
    """

    page: int = 16
    pages: int | None = None
    memory: float = 0.85
    requests: int | None = None
    chunked_prefill: bool = True
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        """Raise InputError if a value is out of its range."""
        for name in ("page", "pages", "requests"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise InputError(f"{name} = {value!r}, expected a positive whole number")
        if not isinstance(self.memory, float) or not 0 < self.memory <= 1:
            raise InputError(f"memory = {self.memory!r}, expected a share above 0 and up to 1.0")


def bytes_per_page(spec: EncoderSpec, page: int, dtype: torch.dtype) -> int:
    """Bytes that the keys and values of one page take, in all layers."""
    assert len(spec.blocks) == len(spec.schedule), "every layer has a cache of its own"
    values = sum(2 * attention.kv_heads * attention.head_dim for attention in spec.attentions)
    return values * page * dtype.itemsize


def count_pages(options: CacheOptions, size: int, most: int, device: torch.device) -> int:
    """As many pages of `size` bytes as memory allows, but no more than could ever be used.

    Raises:
        UnsupportedError: there is no room for one.
    """
    room = _CPU_BYTES
    if device.type == "cuda":
        room = int(torch.cuda.mem_get_info(device)[0] * options.memory)
    pages = min(most, room // size)
    if pages < 1:
        raise UnsupportedError(f"{room} bytes are free for the cache, one page of {options.page} tokens takes {size}")
    return pages
