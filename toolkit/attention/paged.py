"""Attention of decoders, whose keys and values lie in a paged cache: what a backend defines, and which there are."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from toolkit.attention import ANY, HALF, Backend, choose_from
from toolkit.spec import AttentionSpec

__all__ = ["PAGED_BACKENDS", "PagedBackend", "choose_paged_backend"]


class PagedBackend(Protocol):
    """What a paged backend's module defines."""

    def attend_paged(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        starts: Tensor,
        lanes: Tensor,
        tables: Tensor,
        cu_seqlens: Tensor,
        max_len: Tensor,
        scale: float,
        reach: int,
        softcap: float,
    ) -> Tensor:
        """Put the new keys and values into the cache, and attend to all that a sequence has there, causally.

        q [T, N, H], k and v [T, K, H]; the caches [B, P, K, H] are written. `slots` int32 [T] is where each token goes,
        page × P + place in the page, or -1 for nowhere; `starts` int32 [S] how many tokens of a sequence were there
        before; `lanes` int32 [S] its row of `tables` int32 [lanes, pages], which names its pages; `cu_seqlens` int32
        [S + 1] where its new tokens begin; `max_len` int32 [1] on the CPU bounds their number from above. A token sees
        itself and, of those before it, the last `reach`, or all for -1. With a `softcap` (0 for none) the scores are
        softcap × tanh(scores / softcap). Returns [T, N, H]; rows beyond `cu_seqlens[-1]` are undefined.
        """
        ...


# In order of preference.
PAGED_BACKENDS = (
    Backend(
        name="triton",
        module="toolkit.attention.paged_triton",
        device="cuda",
        dtypes=(torch.float32, *HALF),
        max_head_dim=256,
        head_dim_multiple=1,
        scores=("plain", "window", "capped"),
        causal=("plain", "window", "capped"),
    ),
    Backend(
        name="sdpa",
        module="toolkit.attention.paged_sdpa",
        device="cpu",
        dtypes=ANY,
        max_head_dim=2**30,
        head_dim_multiple=1,
        scores=("plain", "window", "capped"),
        causal=("plain", "window", "capped"),
    ),
)


def choose_paged_backend(
    specs: Sequence[AttentionSpec], device: torch.device, dtype: torch.dtype, name: str = "auto"
) -> tuple[str, PagedBackend]:
    """Like `toolkit.attention.choose_backend`, for a decoder."""
    return choose_from(PAGED_BACKENDS, specs, device, dtype, name)
