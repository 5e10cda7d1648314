"""The tables in front of the layers, with both ways in: token ids, or embeddings supplied by the caller.

Shape suffixes: T tokens of all sequences, packed; W width of the seam; D hidden size.
"""

import torch
from torch import Tensor, nn

from toolkit.nn.norm import build_norm
from toolkit.spec import EmbeddingSpec

__all__ = ["Embeddings"]


class Embeddings(nn.Module):
    """Token, segment and position tables, summed in this order, and normalised; a projection to the hidden size.

    The seam is the output of the token table alone, scaled if the model scales it: caller-supplied embeddings take
    its place.
    """

    def __init__(self, spec: EmbeddingSpec, hidden: int) -> None:
        super().__init__()
        self.spec, self.scale = spec, spec.scale
        self.token = nn.Embedding(spec.vocab_size, spec.width)
        summed = hidden if spec.projection == "before_sum" else spec.width
        self.segment = nn.Embedding(spec.segments, summed) if spec.segments else None
        self.position = nn.Embedding(spec.positions, summed) if spec.positions else None
        projected = spec.projection != "none"
        self.projection = nn.Linear(spec.width, hidden, spec.projection_bias) if projected else None
        normalised = hidden if spec.projection == "before_norm" else summed
        self.norm = build_norm(normalised, spec.norm) if spec.norm is not None else None

    def compute_buffers(self) -> None:
        """Round the scale to the weights' dtype, as the references do."""
        self.scale = float(torch.tensor(self.spec.scale, dtype=torch.float64).to(self.token.weight.dtype))

    def look_up(self, ids_T: Tensor) -> Tensor:
        """The seam: int32 [T] → [T, W]."""
        token_TW = self.token(ids_T)
        return token_TW if self.scale == 1 else token_TW * self.scale

    def from_ids(self, ids_T: Tensor, positions_T: Tensor, segments_T: Tensor) -> Tensor:
        """ids, positions, segments: int32 [T] → [T, D]."""
        return self._finish(self.look_up(ids_T), positions_T, segments_T)

    def from_embeds(
        self, embeds_TW: Tensor, is_embed_T: Tensor, ids_T: Tensor, positions_T: Tensor, segments_T: Tensor
    ) -> Tensor:
        """Rows where `is_embed` (bool [T]) come from `embeds`, the others from the token table → [T, D].

        A selection, not a blend: what stands in an unselected slot, NaN included, cannot reach the result.
        """
        token_TW = torch.where(is_embed_T[:, None], embeds_TW, self.look_up(ids_T))
        return self._finish(token_TW, positions_T, segments_T)

    def _finish(self, x: Tensor, positions_T: Tensor, segments_T: Tensor) -> Tensor:
        if self.spec.seam_scale != 1:
            x = x * self.spec.seam_scale
        x = self._project(x, "before_sum")
        if self.segment is not None:
            x = x + self.segment(segments_T)
        if self.position is not None:
            x = x + self.position(positions_T)
        x = self._project(x, "before_norm")
        if self.norm is not None:
            x = self.norm(x)
        return self._project(x, "after_norm")

    def _project(self, x: Tensor, place: str) -> Tensor:
        """Bring `x` to the hidden size, if this is the place for it."""
        return self.projection(x) if self.projection is not None and self.spec.projection == place else x
