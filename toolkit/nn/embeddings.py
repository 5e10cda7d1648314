"""The tables in front of the layers, with both ways in: token ids, or embeddings supplied by the caller.

Shape suffixes: T tokens of all sequences, packed; D hidden size (here also the width of the seam).
"""

import torch
from torch import Tensor, nn

from toolkit.spec import EmbeddingSpec

__all__ = ["Embeddings"]


class Embeddings(nn.Module):
    """Token, segment and position tables, summed in this order, then normalised.

    The seam is the output of the token table alone: caller-supplied embeddings take its place.
    """

    def __init__(self, spec: EmbeddingSpec) -> None:
        super().__init__()
        self.token = nn.Embedding(spec.vocab_size, spec.width)
        self.segment = nn.Embedding(spec.segments, spec.width)
        self.position = nn.Embedding(spec.positions, spec.width)
        self.norm = nn.LayerNorm(spec.width, eps=spec.norm.eps)

    def from_ids(self, ids_T: Tensor, positions_T: Tensor, segments_T: Tensor) -> Tensor:
        """ids, positions, segments: int32 [T] → [T, D]."""
        return self._finish(self.token(ids_T), positions_T, segments_T)

    def from_embeds(
        self, embeds_TD: Tensor, is_embed_T: Tensor, ids_T: Tensor, positions_T: Tensor, segments_T: Tensor
    ) -> Tensor:
        """Rows where `is_embed` (bool [T]) come from `embeds`, the others from the token table → [T, D].

        A selection, not a blend: what stands in an unselected slot, NaN included, cannot reach the result.
        """
        token_TD = torch.where(is_embed_T[:, None], embeds_TD, self.token(ids_T))
        return self._finish(token_TD, positions_T, segments_T)

    def _finish(self, token_TD: Tensor, positions_T: Tensor, segments_T: Tensor) -> Tensor:
        return self.norm(token_TD + self.segment(segments_T) + self.position(positions_T))
