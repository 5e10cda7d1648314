"""Gemma 3's text model as an encoder: EmbeddingGemma (Vera et al., 2025, https://arxiv.org/abs/2509.20354).

Reference: transformers' Gemma3TextModel with `use_bidirectional_attention`.
"""

from dataclasses import replace

from toolkit.config import LAYER_TYPES
from toolkit.errors import UnsupportedError
from toolkit.recipe import ConfigReader
from toolkit.spec import AttentionSpec, BlockSpec, EmbeddingSpec, EncoderSpec, MlpSpec, NormSpec
from toolkit.weights import drop, rename

from .eurobert import RECIPE as EUROBERT

LAYER = "layers.{i}."


def spec(config: ConfigReader) -> EncoderSpec:
    """Effective configuration; defaults are Gemma3TextConfig's."""
    if not config.boolean("use_bidirectional_attention", default=False):
        raise UnsupportedError(
            "config.json: use_bidirectional_attention = False (the default) makes a causal decoder, "
            "which is not supported"
        )
    # transformers widens the window by one token to each side where is_causal is false.
    config.neutral(is_causal=None, attn_logit_softcapping=None, partial_rotary_factor=(None, 1.0))
    hidden = config.integer("hidden_size", 2304)
    heads = config.integer("num_attention_heads", 8)
    head_dim = config.integer("head_dim", 256)
    norm = NormSpec(eps=config.positive("rms_norm_eps", 1e-6), kind="rms", bias=False, offset=True)
    bias = config.boolean("attention_bias", default=False)
    full = AttentionSpec(
        heads=heads,
        kv_heads=config.kv_heads(heads, 4),
        head_dim=head_dim,
        scale=config.positive("query_pre_attn_scalar", 256) ** -0.5,
        causal=False,
        bias=bias,
        out_bias=bias,
        qk_norm=norm,
        rope=config.rope(head_dim, 1e6, "rope_theta", "full_attention"),
    )
    local = replace(
        full,
        # The whole width; transformers makes it w // 2 + 1, exclusive, when it reads a file and undoes that in writing.
        reach=config.integer("sliding_window", 4096, minimum=0) // 2,
        rope=config.rope(head_dim, 1e4, "rope_local_base_freq", "sliding_attention"),
    )
    layers = config.integer("num_hidden_layers", 26, maximum=10_000)
    every = config.optional_integer("sliding_window_pattern") or 6
    stated = config.strings("layer_types", layers, LAYER_TYPES)
    mlp = MlpSpec(
        width=config.integer("intermediate_size", 9216),
        activation=config.activation("hidden_activation", "gelu_pytorch_tanh"),
        bias=False,
        out_bias=False,
        gate="first",
    )
    block = BlockSpec(arrangement="sandwich", attention=full, mlp=mlp, norm=norm)
    blocks = tuple(
        replace(block, name=str(k), attention=local if kind == "sliding_attention" else full)
        for k, kind in enumerate(stated or [LAYER_TYPES[(k + 1) % every > 0] for k in range(layers)])
    )
    return EncoderSpec(
        hidden=hidden,
        blocks=blocks,
        schedule=tuple(block.name for block in blocks),
        usable_length=config.integer("max_position_embeddings", 131_072),
        embedding=EmbeddingSpec(
            vocab_size=config.integer("vocab_size", 262_208), width=hidden, norm=None, scale=hidden**0.5
        ),
        final_norm=norm,
    )


RECIPE = replace(
    EUROBERT,
    model_type="gemma3_text",
    classes=("Gemma3TextModel", "Gemma3ForCausalLM"),
    heads=(),
    spec=spec,
    rules=(
        # EuroBERT's names, but for the norms: post_attention_layernorm comes after attention, not before the MLP.
        *(r for r in EUROBERT.rules if not r.outside and r.target != "blocks.{i}.mlp_norm.weight"),
        rename("blocks.{i}.attention_out_norm.weight", LAYER + "post_attention_layernorm.weight"),
        rename("blocks.{i}.mlp_norm.weight", LAYER + "pre_feedforward_layernorm.weight"),
        rename("blocks.{i}.mlp_out_norm.weight", LAYER + "post_feedforward_layernorm.weight"),
        rename("blocks.{i}.attention.q_norm.weight", LAYER + "self_attn.q_norm.weight"),
        rename("blocks.{i}.attention.k_norm.weight", LAYER + "self_attn.k_norm.weight"),
        drop("rotary_emb_local.inv_freq", why="rotary frequencies are computed from config.json"),
        drop("lm_head.weight", why="the language model's head does not take part in embeddings", outside=True),
    ),
    # Dropout is off at inference; pad tokens never reach a packed batch; the logits' cap belongs to the dropped head;
    # the reference does not read the pattern under its private name.
    irrelevant=frozenset(
        "_sliding_window_pattern attention_dropout cache_implementation final_logit_softcapping pad_token_id".split()
    ),
    tiny={
        **{name: value for name, value in EUROBERT.tiny.items() if name != "mlp_bias"},
        "model_type": "gemma3_text",
        "architectures": ["Gemma3TextModel"],
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 3,
        "sliding_window": 9,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 20.0,
        "rope_scaling": {"rope_type": "linear", "factor": 3.0},
        "use_bidirectional_attention": True,
    },
    note="bidirectional only; sliding_window is the whole width of the window",
)
