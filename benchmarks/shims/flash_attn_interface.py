"""FlashAttention 3 of the fa3-fwd wheel, under the names that transformers looks for."""

from fa3_fwd_interface import (  # pyright: ignore[reportMissingImports]
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
