"""Gemma (Gemma Team, 2024, https://arxiv.org/abs/2403.08295); reference: transformers' GemmaModel."""

from dataclasses import replace

from toolkit.decoders import with_blocks
from toolkit.errors import CheckpointError
from toolkit.heads import causal_head, last_token_head
from toolkit.recipe import ConfigReader
from toolkit.spec import Activation, AttentionSpec, BlockSpec, EmbeddingSpec, EncoderSpec, MlpSpec, NormSpec, stack

from .llama import RECIPE as LLAMA


def _activation(config: ConfigReader, field: str) -> Activation:
    """What `field` names; the other of the two fields must not contradict it, and says nothing where it is null.

    As hidden_act "gelu" stands for its approximation by tanh: so the first checkpoints named that.
    """
    (other,) = {"hidden_act", "hidden_activation"} - {field}
    found: dict[str, Activation] = {
        name: config.activation(name, "gelu_pytorch_tanh")
        for name in (field, other)
        if name == field or config.raw.get(name) is not None
    }
    if found.get("hidden_act") == "gelu":
        found["hidden_act"] = "gelu_tanh"
    if found.get(other, found[field]) != found[field]:
        raise CheckpointError(
            f"config.json: {field} and {other} = {config.raw[other]!r} contradict each other: correct one of them"
        )
    return found[field]


def gemma_spec(
    config: ConfigReader,
    *,
    activation: str = "hidden_activation",
    hidden: int = 2304,
    width: int = 9216,
    layers: int = 26,
    heads: int = 8,
    kv_heads: int = 4,
    words: int = 256_000,
    length: int = 8192,
    causal: bool = True,
) -> EncoderSpec:
    """What the Gemmas share, without positions. Arguments are defaults, and which field names the activation."""
    config.neutral(partial_rotary_factor=(None, 1.0))
    size, count = config.integer("hidden_size", hidden), config.integer("num_attention_heads", heads)
    head_dim = config.integer("head_dim", 256)
    norm = NormSpec(eps=config.positive("rms_norm_eps", 1e-6), kind="rms", bias=False, offset=True)
    bias = config.boolean("attention_bias", default=False)
    attention = AttentionSpec(
        heads=count,
        kv_heads=config.kv_heads(count, kv_heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        causal=causal,
        bias=bias,
        out_bias=bias,
    )
    mlp = MlpSpec(
        width=config.integer("intermediate_size", width),
        activation=_activation(config, activation),
        bias=False,
        out_bias=False,
        gate="first",
    )
    block = BlockSpec(arrangement="pre", attention=attention, mlp=mlp, norm=norm)
    blocks = stack(config.integer("num_hidden_layers", layers, maximum=10_000), block)
    table = config.integer("vocab_size", words)
    return EncoderSpec(
        hidden=size,
        blocks=blocks,
        schedule=tuple(block.name for block in blocks),
        usable_length=config.integer("max_position_embeddings", length),
        embedding=EmbeddingSpec(vocab_size=table, width=size, norm=None, scale=size**0.5),
        final_norm=norm,
    )


def spec(config: ConfigReader) -> EncoderSpec:
    """Effective configuration; defaults are GemmaConfig's."""
    config.neutral(is_causal=(None, True), use_bidirectional_attention=(None, False))
    base = gemma_spec(config, activation="hidden_act", hidden=3072, width=24_576, layers=28, heads=16, kv_heads=16)
    rope = config.rope(base.attentions[0].head_dim, 10_000.0, more=("llama3", "yarn"))
    return with_blocks(base, lambda k, block: replace(block, attention=replace(block.attention, rope=rope)))


RECIPE = replace(
    LLAMA,
    model_type="gemma",
    classes=("GemmaModel",),
    spec=spec,
    heads=(causal_head("GemmaForCausalLM", tied=True), last_token_head("GemmaForSequenceClassification", pad=0)),
    # Dropout is off; pad tokens are ordinary rows of the table; hidden_activation is read where it is not null.
    irrelevant=frozenset("attention_dropout hidden_activation pad_token_id".split()),
    tiny={
        **{name: value for name, value in LLAMA.tiny.items() if name != "mlp_bias"},
        "model_type": "gemma",
        "architectures": ["GemmaModel"],
    },
)
