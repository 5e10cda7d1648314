"""Attention over packed sequences: one file a backend, and the table that says which are there.

A backend is chosen when a module is built, never inside `forward`. Each of its functions is one custom op with a
fake implementation, so the compiler sees a single node and the graph stays whole.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from toolkit.errors import UnsupportedError
from toolkit.spec import AttentionSpec, DisentangledSpec

__all__ = ["ANY", "BACKENDS", "HALF", "AttentionBackend", "Backend", "choose_backend", "choose_from"]

Scores = Literal["plain", "window", "capped", "bias", "disentangled"]


class AttentionBackend(Protocol):
    """What a backend's module defines; `attend_biased` and `attend_disentangled` only if its row says so.

    q [T, N, H], k and v [T, K, H], cu_seqlens int32 [S + 1], max_len int32 [1] on the CPU → [T, N, H]. `max_len` is
    an upper bound of the sequence lengths. Rows beyond `cu_seqlens[-1]` are left undefined. A distance is the
    query's position minus the key's; tables of distances have R = 2 × longest - 1 columns, distance 0 in the middle.
    """

    def attend(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        cu_seqlens: Tensor,
        max_len: Tensor,
        scale: float,
        reach: int,
        keys_S: Tensor | None = None,
        causal: bool = False,
        softcap: float = 0.0,
    ) -> Tensor:
        """Attend within each sequence, if `causal` to a token itself and those before it.

        `reach` is how far to either side, -1 for all. Only the first `keys_S` (int32 [S]) tokens of a sequence are
        attended to, None for all; each token must reach one of them. With a `softcap` (0 for none) the scores are
        softcap × tanh(scores / softcap).
        """
        ...

    def attend_biased(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        cu_seqlens: Tensor,
        max_len: Tensor,
        scale: float,
        bias_NR: Tensor,
    ) -> Tensor:
        """Add `bias_NR` (float32) to the scores of each head, by distance."""
        ...

    def attend_disentangled(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        cu_seqlens: Tensor,
        max_len: Tensor,
        scale: float,
        content_q_TNB: Tensor | None,
        content_k_TNB: Tensor | None,
        bucket_of_R: Tensor,
    ) -> Tensor:
        """Add to a score its query's and its key's entry for the bucket of the distance (int32)."""
        ...


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One row of the table: where it lives and what it can do.

    `keyed` are the kinds of scores with which it can leave keys out (`keys_S` of `AttentionBackend.attend`), `causal`
    those with which it can leave out what comes later. Those with "capped" scores have them with windows too.
    """

    name: str
    module: str
    device: str
    dtypes: tuple[torch.dtype, ...]
    max_head_dim: int
    head_dim_multiple: int
    scores: tuple[Scores, ...]
    keyed: tuple[Scores, ...] = ()
    causal: tuple[Scores, ...] = ()

    def why_unavailable(self) -> str | None:
        """None if it can run on this machine, else the reason and the fix."""
        return importlib.import_module(self.module).why_unavailable()

    def why_unfit(
        self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype, keyed: bool = False
    ) -> str | None:
        """None if it can compute `spec` exactly, else the reason."""
        if device.type != self.device:
            return f"runs on {self.device} only"
        if dtype not in self.dtypes:
            return f"does not take {dtype}"
        if spec.head_dim > self.max_head_dim:
            return f"head size {spec.head_dim} exceeds {self.max_head_dim}"
        if spec.head_dim % self.head_dim_multiple:
            return f"head size {spec.head_dim} is no multiple of {self.head_dim_multiple}"
        needed = _scores(spec)
        if needed not in self.scores:
            return f"has no {needed} scores"
        if spec.causal and needed not in self.causal:
            return f"has no causal {needed} scores"
        if keyed and needed not in self.keyed:
            return f"cannot leave keys out of {needed} scores"
        return self.why_unavailable()

    def load(self) -> Any:
        """Import the backend's module."""
        return importlib.import_module(self.module)


def _scores(spec: AttentionSpec) -> Scores:
    if spec.distance is not None:
        if spec.reach is not None:
            raise UnsupportedError("a window together with a bias by distance is not supported")
        if spec.softcap is not None:
            raise UnsupportedError("capped scores together with a bias by distance are not supported")
        return "disentangled" if isinstance(spec.distance, DisentangledSpec) else "bias"
    if spec.softcap is not None:
        return "capped"
    return "plain" if spec.reach is None else "window"


HALF = (torch.float16, torch.bfloat16)
ANY = (torch.float64, torch.float32, *HALF)

# In order of preference.
BACKENDS = (
    Backend(
        name="efficient",
        module="toolkit.attention.efficient",
        device="cuda",
        dtypes=(torch.float32,),
        max_head_dim=2**16,
        head_dim_multiple=8,
        scores=("plain",),
        keyed=("plain",),
    ),
    Backend(
        name="triton",
        module="toolkit.attention.triton_varlen",
        device="cuda",
        dtypes=(torch.float32, *HALF),
        max_head_dim=128,
        head_dim_multiple=1,
        scores=("plain", "window", "capped", "bias", "disentangled"),
        keyed=("plain", "window", "capped"),
        causal=("plain", "window", "capped"),
    ),
    # With fewer keys than queries the kernel's window hangs on the last key instead of on the query's own place.
    Backend(
        name="varlen",
        module="toolkit.attention.varlen",
        device="cuda",
        dtypes=HALF,
        max_head_dim=256,
        head_dim_multiple=8,
        scores=("plain", "window"),
        keyed=("plain",),
    ),
    # The package's build has neither float16 nor windows.
    Backend(
        name="flash3",
        module="toolkit.attention.flash3",
        device="cuda",
        dtypes=(torch.bfloat16,),
        max_head_dim=256,
        head_dim_multiple=8,
        scores=("plain",),
    ),
    Backend(
        name="sdpa",
        module="toolkit.attention.sdpa",
        device="cpu",
        dtypes=ANY,
        max_head_dim=2**30,
        head_dim_multiple=1,
        scores=("plain", "window", "capped", "bias", "disentangled"),
        keyed=("plain", "window", "capped"),
        causal=("plain", "window", "capped"),
    ),
)


def choose_backend(
    specs: Sequence[AttentionSpec], device: torch.device, dtype: torch.dtype, name: str = "auto", *, keyed: bool = False
) -> tuple[str, AttentionBackend]:
    """Return the name and the module of the first backend that fits all `specs`, or of the one that is asked for.

    `keyed` says that some tokens are not attended to.

    Raises:
        UnsupportedError: none fits; the message gives each one's reason.
    """
    return choose_from(BACKENDS, specs, device, dtype, name, keyed=keyed)


def choose_from(
    table: Sequence[Backend],
    specs: Sequence[AttentionSpec],
    device: torch.device,
    dtype: torch.dtype,
    name: str,
    *,
    keyed: bool = False,
) -> tuple[str, Any]:
    """`choose_backend` from another table."""
    reasons: list[str] = []
    for backend in table:
        if name not in ("auto", backend.name):
            continue
        reason = next(filter(None, (backend.why_unfit(spec, device, dtype, keyed) for spec in specs)), None)
        if reason is None:
            return backend.name, backend.load()
        reasons.append(f"{backend.name}: {reason}")
    raise UnsupportedError(f"no attention backend for {dtype} on {device} ({'; '.join(reasons) or name})")
