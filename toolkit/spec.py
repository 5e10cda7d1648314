"""What a converted model is, as plain data: the effective configuration that the artifact stores.

A recipe turns a checkpoint's `config.json` into one of these; `toolkit.nn` builds the module from it.
Nothing here knows a model's name.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Activation", "AttentionSpec", "EmbeddingSpec", "EncoderSpec", "MlpSpec", "NormSpec"]

Activation = Literal["gelu", "gelu_tanh", "relu", "silu", "tanh"]


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """Layer normalisation over the last dimension."""

    eps: float


@dataclass(frozen=True, kw_only=True)
class EmbeddingSpec:
    """The tables in front of the layers. The seam (what callers may pass as embeds) is `width` wide.

    `position_start` is the row of the position table that a sequence's first token reads;
    `segments` is 0 for a model without a segment table.
    """

    vocab_size: int
    width: int
    positions: int
    position_start: int
    segments: int
    norm: NormSpec


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Self-attention; scores are scaled by `scale`."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    causal: bool
    bias: bool


@dataclass(frozen=True, kw_only=True)
class MlpSpec:
    """Two linear layers with an activation between them."""

    width: int
    activation: Activation
    bias: bool


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """A stack of layers with the norm after each residual addition (post-norm), as in BERT."""

    hidden: int
    layers: int
    usable_length: int
    embedding: EmbeddingSpec
    attention: AttentionSpec
    mlp: MlpSpec
    norm: NormSpec

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dicts, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "EncoderSpec":
        """Inverse of `to_dict`; missing or unknown keys raise TypeError or KeyError."""
        embedding = dict(data["embedding"])
        return cls(
            **{
                **data,
                "embedding": EmbeddingSpec(**{**embedding, "norm": NormSpec(**embedding["norm"])}),
                "attention": AttentionSpec(**data["attention"]),
                "mlp": MlpSpec(**data["mlp"]),
                "norm": NormSpec(**data["norm"]),
            }
        )
