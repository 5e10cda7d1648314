"""What the decoders share that differ from Llama in few things, for their recipes."""

from collections.abc import Callable
from dataclasses import replace

from toolkit.checkpoint import Checkpoint
from toolkit.config import LAYER_TYPES, ConfigReader
from toolkit.errors import CheckpointError, UnsupportedError
from toolkit.spec import AttentionSpec, BlockSpec, EmbeddingSpec, EncoderSpec, MlpSpec, NormSpec, stack
from toolkit.weights import drop, fuse, rename

__all__ = ["LAYER", "LAYER_RULES", "by_layer_types", "decoder_spec", "read_ends", "sliding", "with_blocks"]

LAYER = "layers.{i}."
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


def decoder_spec(
    config: ConfigReader, *, width: int, kv_heads: int | None, length: int, words: int, head_dim: int | None = None
) -> EncoderSpec:
    """What these decoders share. Arguments are defaults that differ; `head_dim` by default hidden size / heads."""
    config.neutral(partial_rotary_factor=(None, 1.0))
    hidden, heads = config.integer("hidden_size", 4096), config.integer("num_attention_heads", 32)
    stated = config.optional_integer("head_dim")
    size = stated or head_dim or config.head_dim(hidden, heads)
    norm = NormSpec(eps=config.positive("rms_norm_eps", 1e-6), kind="rms", bias=False)
    attention = AttentionSpec(
        heads=heads,
        kv_heads=config.kv_heads(heads, kv_heads),
        head_dim=size,
        scale=size**-0.5,
        causal=config.boolean("is_causal", default=True),
        bias=False,
        out_bias=False,
        rope=config.rope(size, 10_000.0, more=("llama3", "yarn")),
    )
    mlp = MlpSpec(
        width=config.integer("intermediate_size", width),
        activation=config.activation("hidden_act", "silu"),
        bias=False,
        out_bias=False,
        gate="first",
    )
    block = BlockSpec(arrangement="pre", attention=attention, mlp=mlp, norm=norm)
    blocks = stack(config.integer("num_hidden_layers", 32, maximum=10_000), block)
    return EncoderSpec(
        hidden=hidden,
        blocks=blocks,
        schedule=tuple(block.name for block in blocks),
        usable_length=config.integer("max_position_embeddings", length),
        embedding=EmbeddingSpec(vocab_size=config.integer("vocab_size", words), width=hidden, norm=None),
        final_norm=norm,
    )


def with_blocks(spec: EncoderSpec, change: Callable[[int, BlockSpec], BlockSpec]) -> EncoderSpec:
    """The same with other blocks; `change` gets each block's number too."""
    return replace(spec, blocks=tuple(change(k, block) for k, block in enumerate(spec.blocks)))


def sliding(attention: AttentionSpec, window: int) -> AttentionSpec:
    """Attention to a token itself and the `window` - 1 tokens before it."""
    if not attention.causal:
        raise UnsupportedError("config.json: is_causal = False is not supported together with sliding_window")
    return replace(attention, reach=window - 1)


def by_layer_types(config: ConfigReader, spec: EncoderSpec) -> EncoderSpec:
    """Windows in some layers: those that `layer_types` names, or all from `max_window_layers` on."""
    stated = config.optional_integer("sliding_window")
    default = None if "sliding_window" in config.raw else 4096  # null is no window
    window = (stated or default) if config.boolean("use_sliding_window", default=False) else None
    first = config.integer("max_window_layers", 28, minimum=0)
    types = config.strings("layer_types", len(spec.blocks), LAYER_TYPES)
    names = types or [LAYER_TYPES[window is not None and k >= first] for k in range(len(spec.blocks))]
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
