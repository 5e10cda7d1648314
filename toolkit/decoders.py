"""What the decoders share that differ from Llama in few things, for their recipes."""

from collections.abc import Callable
from dataclasses import replace

from toolkit.checkpoint import Checkpoint
from toolkit.config import LAYER_TYPES, ConfigReader
from toolkit.errors import CheckpointError, UnsupportedError
from toolkit.spec import (
    AttentionSpec,
    BlockSpec,
    EmbeddingSpec,
    EncoderSpec,
    ExpertsSpec,
    MlpSpec,
    NormSpec,
    RopeSpec,
    stack,
)
from toolkit.weights import Rule, drop, fuse, rename

__all__ = [
    "LAYER",
    "LAYER_RULES",
    "by_layer_types",
    "decoder_spec",
    "expert_rules",
    "read_ends",
    "read_experts",
    "sliding",
    "sliding_everywhere",
    "whole_heads",
    "with_biases",
    "with_blocks",
]

LAYER = "layers.{i}."
_EXPERTS = "blocks.{i}.mlp.experts"
_COMPUTED = "rotary frequencies are computed from config.json"

# The tensors of the model without a head, under Llama's names.
LAYER_RULES = (
    rename("embeddings.token.weight", "embed_tokens.weight"),
    rename("blocks.{i}.attention_norm.weight", LAYER + "input_layernorm.weight"),
    fuse("blocks.{i}.attention.qkv.{p}", *(f"{LAYER}self_attn.{name}_proj.{{p}}" for name in "qkv")),
    rename("blocks.{i}.attention.out.{p}", LAYER + "self_attn.o_proj.{p}"),
    rename("blocks.{i}.mlp_norm.weight", LAYER + "post_attention_layernorm.weight"),
    fuse("blocks.{i}.mlp.up.{p}", LAYER + "mlp.gate_proj.{p}", LAYER + "mlp.up_proj.{p}"),
    rename("blocks.{i}.mlp.down.{p}", LAYER + "mlp.down_proj.{p}"),
    rename("final_norm.weight", "norm.weight"),
    drop("rotary_emb.inv_freq", why=_COMPUTED),
    drop(LAYER + "self_attn.rotary_emb.inv_freq", why=_COMPUTED),
)


def expert_rules(gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """The tensors of a router and its experts: each by itself, with projections of these names, or stacked."""
    each, ups, downs = LAYER + "mlp.experts.{e}.", _EXPERTS + "_up.weight", _EXPERTS + "_down.weight"
    return (
        rename("blocks.{i}.mlp.router.weight", LAYER + "mlp.gate.weight"),
        fuse(ups, f"{each}{gate}.weight", f"{each}{up}.weight"),
        fuse(downs, f"{each}{down}.weight"),
        rename(ups, LAYER + "mlp.experts.gate_up_proj", layout="stacked"),
        rename(downs, LAYER + "mlp.experts.down_proj", layout="stacked"),
    )


# (configuration, size of a head) → rotary positions
ReadRope = Callable[[ConfigReader, int], RopeSpec]


def whole_heads(config: ConfigReader, size: int, base: float = 10_000.0) -> RopeSpec:
    """Rotary positions over whole heads; `base` is the default."""
    config.neutral(partial_rotary_factor=(None, 1.0))
    return config.rope(size, base, more=("llama3", "yarn"))


def decoder_spec(
    config: ConfigReader,
    *,
    width: int,
    kv_heads: int | None,
    length: int,
    words: int,
    head_dim: int | None = None,
    hidden_size: int = 4096,
    attention_heads: int = 32,
    layers: int = 32,
    eps: float = 1e-6,
    rope: ReadRope = whole_heads,
) -> EncoderSpec:
    """What these decoders share. Arguments are defaults that differ; `head_dim` by default hidden size / heads."""
    hidden, heads = config.integer("hidden_size", hidden_size), config.integer("num_attention_heads", attention_heads)
    stated = config.optional_integer("head_dim")
    size = stated or head_dim or config.head_dim(hidden, heads)
    norm = NormSpec(eps=config.positive("rms_norm_eps", eps), kind="rms", bias=False)
    attention = AttentionSpec(
        heads=heads,
        kv_heads=config.kv_heads(heads, kv_heads),
        head_dim=size,
        scale=size**-0.5,
        causal=config.boolean("is_causal", default=True),
        bias=False,
        out_bias=False,
        rope=rope(config, size),
    )
    mlp = MlpSpec(
        width=config.integer("intermediate_size", width),
        activation=config.activation("hidden_act", "silu"),
        bias=False,
        out_bias=False,
        gate="first",
    )
    block = BlockSpec(arrangement="pre", attention=attention, mlp=mlp, norm=norm)
    blocks = stack(config.integer("num_hidden_layers", layers, maximum=10_000), block)
    return EncoderSpec(
        hidden=hidden,
        blocks=blocks,
        schedule=tuple(block.name for block in blocks),
        usable_length=config.integer("max_position_embeddings", length),
        embedding=EmbeddingSpec(vocab_size=config.integer("vocab_size", words), width=hidden, norm=None),
        final_norm=norm,
    )


def read_experts(
    config: ConfigReader, names: tuple[str, ...], *, count: int, chosen: int, normalise: bool
) -> ExpertsSpec:
    """How many experts there are, by one of these names, and `num_experts_per_tok`; arguments are the defaults."""
    count = config.integer(names, count)
    chosen = config.integer("num_experts_per_tok", chosen)
    if chosen > count:
        raise CheckpointError(f"config.json: num_experts_per_tok = {chosen}, but {names[0]} = {count}")
    return ExpertsSpec(count=count, chosen=chosen, normalise=normalise)


def with_blocks(spec: EncoderSpec, change: Callable[[int, BlockSpec], BlockSpec]) -> EncoderSpec:
    """The same with other blocks; `change` gets each block's number too."""
    return replace(spec, blocks=tuple(change(k, block) for k, block in enumerate(spec.blocks)))


def with_biases(config: ConfigReader, spec: EncoderSpec) -> EncoderSpec:
    """The same with the biases that `attention_bias` and `mlp_bias` say, by default none."""
    bias, mlp_bias = config.boolean("attention_bias", default=False), config.boolean("mlp_bias", default=False)

    def change(k: int, block: BlockSpec) -> BlockSpec:
        attention = replace(block.attention, bias=bias, out_bias=bias)
        return replace(block, attention=attention, mlp=replace(block.mlp, bias=mlp_bias, out_bias=mlp_bias))

    return with_blocks(spec, change)


def sliding(attention: AttentionSpec, window: int) -> AttentionSpec:
    """Attention to a token itself and the `window` - 1 tokens before it."""
    if not attention.causal:
        raise UnsupportedError("config.json: is_causal = False is not supported together with sliding_window")
    return replace(attention, reach=window - 1)


def _window(config: ConfigReader, default: int | None) -> int | None:
    """`sliding_window`, whose default applies where it is absent: null is no window."""
    stated = config.optional_integer("sliding_window")
    return stated if "sliding_window" in config.raw else default


def sliding_everywhere(config: ConfigReader, spec: EncoderSpec, *, default: int | None) -> EncoderSpec:
    """Windows in all layers, if `sliding_window` is not null; `default` is what it is where it is absent."""
    window = _window(config, default)
    if window is None:
        return spec
    return with_blocks(spec, lambda k, block: replace(block, attention=sliding(block.attention, window)))


def from_max_window_layers(config: ConfigReader, spec: EncoderSpec) -> list[bool]:
    """Whether each layer is one of those from `max_window_layers` on."""
    first = config.integer("max_window_layers", 28, minimum=0)
    return [k >= first for k in range(len(spec.blocks))]


def by_layer_types(
    config: ConfigReader,
    spec: EncoderSpec,
    *,
    slides: Callable[[ConfigReader, EncoderSpec], list[bool]] = from_max_window_layers,
    default: int | None = 4096,
) -> EncoderSpec:
    """Windows in some layers: those that `layer_types` names, or where it is absent those for which `slides` holds.

    `default` is that of `sliding_window`.
    """
    stated = _window(config, default)
    window = stated if config.boolean("use_sliding_window", default=False) else None
    usual = slides(config, spec)
    types = config.strings("layer_types", len(spec.blocks), LAYER_TYPES)
    names = types or [LAYER_TYPES[window is not None and usual[k]] for k in range(len(spec.blocks))]
    if window is None:
        if "sliding_attention" in names:
            raise UnsupportedError(
                "config.json: layer_types has sliding_attention, but use_sliding_window and sliding_window say "
                "that there is no window"
            )
        return spec

    def change(k: int, block: BlockSpec) -> BlockSpec:
        slides = names[k] == "sliding_attention"
        return replace(block, attention=sliding(block.attention, window)) if slides else block

    return with_blocks(spec, change)


def read_ends(checkpoint: Checkpoint, spec: EncoderSpec) -> tuple[int, ...]:
    """The ids that end a generated text: generation_config.json's `eos_token_id`, else that of config.json.

    Raises:
        CheckpointError: it is no id, or none of the vocabulary.
        UnsupportedError: attention is not causal, so that nothing can be generated token by token.
    """
    if not all(attention.causal for attention in spec.attentions):
        raise UnsupportedError("config.json: is_causal = False is not supported for task 'generate'")
    file = "generation_config.json" if checkpoint.has("generation_config.json") else "config.json"
    value = checkpoint.json(file).get("eos_token_id")
    if value is None and file != "config.json":
        file, value = "config.json", checkpoint.config.get("eos_token_id")
    ends = [] if value is None else value if isinstance(value, list) else [value]
    for token in ends:
        if type(token) is not int or not 0 <= token < spec.embedding.vocab_size:
            raise CheckpointError(
                f"{file}: eos_token_id = {value!r}, expected ids below {spec.embedding.vocab_size} (vocab_size)"
            )
    return tuple(dict.fromkeys(ends))
