"""What a converted model is, as plain data: the effective configuration that the artifact stores.

A recipe turns a checkpoint's `config.json` into one of these; `toolkit.nn` builds the module from it.
Nothing here knows a model's name.
"""

import dataclasses
import types
import typing
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

__all__ = [
    "Activation",
    "AlibiSpec",
    "AttentionSpec",
    "BlockSpec",
    "BucketBiasSpec",
    "DisentangledSpec",
    "DistanceSpec",
    "EmbeddingSpec",
    "EncoderSpec",
    "ExpertsSpec",
    "Gate",
    "Llama3Scaling",
    "LayerMixSpec",
    "MlpSpec",
    "NormSpec",
    "RopeSpec",
    "YarnScaling",
    "self_attention",
    "stack",
]

Activation = Literal["gelu", "gelu_tanh", "identity", "relu", "sigmoid", "silu", "tanh"]
Gate = Literal["none", "first", "second"]


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What the artifact stores as JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dicts."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Inverse of `to_dict`; missing or unknown keys raise TypeError."""
        return _build(cls, data)


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """Layer or root-mean-square normalisation over the last dimension.

    `offset` says that the stored weights are distances from one, as in Gemma.
    """

    eps: float
    kind: Literal["layer", "rms"] = "layer"
    bias: bool = True
    offset: bool = False


@dataclass(frozen=True, kw_only=True)
class EmbeddingSpec:
    """The tables in front of the layers. The seam (what callers may pass as embeds) is `width` wide.

    `scale` multiplies the token table's output, before the seam, `seam_scale` what comes through the seam.
    `positions` and `segments` are the rows of their tables, 0 for a model without; `position_start` is the position
    of a sequence's first token. Tokens whose id is `position_pad` stand at the position before and do not count, as
    in RoBERTa. `projection` says where a linear layer brings `width` to the hidden size: before segments and positions
    are added, before the norm, or after it.
    """

    vocab_size: int
    width: int
    norm: NormSpec | None
    positions: int = 0
    position_start: int = 0
    position_pad: int | None = None
    segments: int = 0
    scale: float = 1.0
    seam_scale: float = 1.0
    projection: Literal["none", "before_sum", "before_norm", "after_norm"] = "none"
    projection_bias: bool = True


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3's: frequencies that turn less than `low` times within `original` tokens are divided by `factor`.

    Those that turn more than `high` times stay, between the two there is a smooth transition.
    """

    kind: Literal["llama3"] = "llama3"
    factor: float
    low: float
    high: float
    original: int


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al., 2023): like Llama3Scaling with a linear ramp between dimensions.

    The ramp lies between those that turn `fast` and `slow` times within `original` tokens, rounded outwards if
    `truncate`. Cosines and sines are multiplied by `magnitude`.
    """

    kind: Literal["yarn"] = "yarn"
    factor: float
    original: int
    fast: float
    slow: float
    truncate: bool
    magnitude: float


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary positions (Su et al., 2021) over the first `dims` values of each head.

    Angles are position / `factor` × `base` ** (-2i / dims), or as `scaling` has them.
    """

    base: float
    dims: int
    factor: float = 1.0
    scaling: Llama3Scaling | YarnScaling | None = None


@dataclass(frozen=True, kw_only=True)
class BucketBiasSpec:
    """T5's bias: one learned number for each head and bucket of distances, the same in every layer."""

    kind: Literal["buckets"] = "buckets"
    buckets: int
    max_distance: int


@dataclass(frozen=True, kw_only=True)
class AlibiSpec:
    """ALiBi (Press et al., 2021), symmetric: minus slope × |distance|."""

    kind: Literal["alibi"] = "alibi"


@dataclass(frozen=True, kw_only=True)
class DisentangledSpec:
    """DeBERTa's terms: content against a table of `2 * span` embedded distances, and the other way round.

    Args:
        span: half the table's rows.
        buckets: distances beyond `buckets // 2` share logarithmic buckets; 0 for none.
        max_distance: the distance that fills the last bucket.
        c2p, p2c: which terms there are.
        shared: whether the layers' query and key projections serve the distances too.
        norm: applied to the table.
    """

    kind: Literal["disentangled"] = "disentangled"
    span: int
    buckets: int
    max_distance: int
    c2p: bool
    p2c: bool
    shared: bool
    norm: NormSpec | None


DistanceSpec = BucketBiasSpec | AlibiSpec | DisentangledSpec


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Self-attention; scores are scaled by `scale`, and with a `softcap` become softcap × tanh(scores / softcap).

    `reach` is how many tokens to either side a token sees, None for all. `bias` is that of the query, key and value
    projections. `qk_norm` normalises queries and keys, each head alone or (`qk_norm_over` "all") all heads at once.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    causal: bool
    bias: bool
    out_bias: bool
    reach: int | None = None
    rope: RopeSpec | None = None
    qk_norm: NormSpec | None = None
    qk_norm_over: Literal["head", "all"] = "head"
    distance: DistanceSpec | None = None
    softcap: float | None = None


def self_attention(heads: int, head_dim: int, *, bias: bool, rope: RopeSpec | None = None) -> AttentionSpec:
    """The usual attention of an encoder: as many key/value heads, scores over the root of the head size."""
    return AttentionSpec(
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        causal=False,
        bias=bias,
        out_bias=bias,
        rope=rope,
    )


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts (Shazeer et al., 2017): `count` blocks of one shape, of which each token goes through a few.

    A router gives each token a probability for every expert. The `chosen` likeliest experts' outputs are summed,
    weighted with these probabilities, which are divided by their sum first if `normalise`.
    """

    count: int
    chosen: int
    normalise: bool


@dataclass(frozen=True, kw_only=True)
class MlpSpec:
    """Two linear layers with an activation between them, once or, with `experts`, for each of them.

    With a `gate` the first one is twice as wide; one of its halves goes through the activation and multiplies the
    other.
    """

    width: int
    activation: Activation
    bias: bool
    out_bias: bool
    gate: Gate = "none"
    experts: ExpertsSpec | None = None


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """One layer, whose weights are called `blocks.NAME`.

    The norm comes after each residual addition ("post"), before each branch ("pre"), after each branch and before the
    addition ("post_branch"), or before and after each branch ("sandwich"). In "post_twice" the sum after attention is
    normalised, added to the layer's input once more and normalised again. In "parallel" both branches read the layer's
    input, each through its own norm. `attention_norm` is False where the first norm is left out. What a branch adds is
    multiplied by `residual_scale`.
    """

    name: str = "0"
    arrangement: Literal["parallel", "post", "post_branch", "post_twice", "pre", "sandwich"]
    attention: AttentionSpec
    mlp: MlpSpec
    norm: NormSpec
    attention_norm: bool = True
    residual_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class LayerMixSpec:
    """A weighted mean of the states of several depths, with a learned weight for each.

    Depth 0 is what the first layer reads, the last depth what comes out of the final norm. The mean is over the
    `count` last depths, from `start` on.
    """

    start: int
    count: int


@dataclass(frozen=True, kw_only=True)
class EncoderSpec(Stored):
    """A stack of layers. `schedule` names the block that runs at each depth: depths may share a block.

    With a `mix`, its mean stands for the last depth's states. Where `projected` is not 0, a linear layer behind the
    final norm brings the states to that width.
    """

    hidden: int
    usable_length: int
    embedding: EmbeddingSpec
    blocks: tuple[BlockSpec, ...]
    schedule: tuple[str, ...]
    final_norm: NormSpec | None = None
    mix: LayerMixSpec | None = None
    projected: int = 0

    @property
    def state_width(self) -> int:
        """The width of the token states."""
        return self.projected or self.hidden

    @property
    def attentions(self) -> list[AttentionSpec]:
        """The attention of each block."""
        return [block.attention for block in self.blocks]


def stack(count: int, block: BlockSpec) -> tuple[BlockSpec, ...]:
    """Layers that differ in nothing but their names, `0` … `count - 1`."""
    return tuple(dataclasses.replace(block, name=str(k)) for k in range(count))


def _build(kind: Any, value: Any) -> Any:
    """Turn the plain data of a field of type `kind` back into what it was."""
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        different = sorted(set(hints) ^ set(value))
        if different:
            raise TypeError(f"{kind}: {different[0]!r} is missing or unknown")
        return kind(**{name: _build(hints[name], item) for name, item in value.items()})  # type: ignore[operator]
    if typing.get_origin(kind) is tuple:
        return tuple(_build(typing.get_args(kind)[0], item) for item in value)
    if typing.get_origin(kind) in (types.UnionType, typing.Union) and isinstance(value, dict):
        options = [option for option in typing.get_args(kind) if dataclasses.is_dataclass(option)]
        tagged = {getattr(option, "kind", None): option for option in options}
        return _build(tagged[value["kind"]] if len(options) > 1 else options[0], value)
    return value
