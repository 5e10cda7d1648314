"""ModernBERT (Warner et al., 2024, https://arxiv.org/abs/2412.13663); reference: transformers' ModernBertModel."""

from dataclasses import replace

from toolkit.config import LAYER_TYPES
from toolkit.heads import normed_head, normed_mlm_head
from toolkit.recipe import ConfigReader, Recipe
from toolkit.spec import BlockSpec, EmbeddingSpec, EncoderSpec, MlpSpec, NormSpec, self_attention
from toolkit.weights import drop, rename

LAYER = "layers.{i}."


def spec(config: ConfigReader) -> EncoderSpec:
    """Effective configuration; defaults are ModernBertConfig's."""
    # transformers lets sliding_window overwrite local_attention, and rope_scaling scale both kinds of layers.
    config.neutral(causal_mask=False, is_causal=False)
    config.neutral(sliding_window=None, rope_scaling=None, partial_rotary_factor=(None, 1.0))
    hidden = config.integer("hidden_size", 768)
    heads = config.integer("num_attention_heads", 12)
    head_dim = config.head_dim(hidden, heads)
    norm = NormSpec(eps=config.positive("norm_eps", 1e-5), bias=config.boolean("norm_bias", default=False))
    attention_bias = config.boolean("attention_bias", default=False)
    mlp_bias = config.boolean("mlp_bias", default=False)
    full = self_attention(
        heads,
        head_dim,
        bias=attention_bias,
        rope=config.rope(head_dim, 160_000.0, "global_rope_theta", "full_attention"),
    )
    local = replace(
        full,
        reach=config.integer("local_attention", 128) // 2,  # the whole width, half of it to either side
        rope=config.rope(head_dim, 10_000.0, "local_rope_theta", "sliding_attention"),
    )
    mlp = MlpSpec(
        width=config.integer("intermediate_size", 1152),
        activation=config.activation("hidden_activation", "gelu"),
        bias=mlp_bias,
        out_bias=mlp_bias,
        gate="first",
    )
    layers = config.integer("num_hidden_layers", 22, maximum=10_000)
    every = config.optional_integer("global_attn_every_n_layers") or 3
    types = config.strings("layer_types", layers, LAYER_TYPES) or [LAYER_TYPES[k % every > 0] for k in range(layers)]
    block = BlockSpec(arrangement="pre", attention=full, mlp=mlp, norm=norm)
    blocks = tuple(
        # The embeddings are normalised, so the first layer does without.
        replace(block, name=str(k), attention=local if kind == "sliding_attention" else full, attention_norm=k > 0)
        for k, kind in enumerate(types)
    )
    return EncoderSpec(
        hidden=hidden,
        blocks=blocks,
        schedule=tuple(block.name for block in blocks),
        usable_length=config.integer("max_position_embeddings", 8192),
        embedding=EmbeddingSpec(vocab_size=config.integer("vocab_size", 50368), width=hidden, norm=norm),
        final_norm=norm,
    )


RECIPE = Recipe(
    model_type="modernbert",
    classes=("ModernBertModel", "ModernBertForMaskedLM"),
    tasks=("embed",),
    spec=spec,
    prefixes=("model.",),
    aliases={},
    rules=(
        rename("embeddings.token.weight", "embeddings.tok_embeddings.weight"),
        rename("embeddings.norm.{p}", "embeddings.norm.{p}"),
        rename("blocks.{i}.attention_norm.{p}", LAYER + "attn_norm.{p}"),
        rename("blocks.{i}.attention.qkv.{p}", LAYER + "attn.Wqkv.{p}"),
        rename("blocks.{i}.attention.out.{p}", LAYER + "attn.Wo.{p}"),
        rename("blocks.{i}.mlp_norm.{p}", LAYER + "mlp_norm.{p}"),
        rename("blocks.{i}.mlp.up.{p}", LAYER + "mlp.Wi.{p}"),
        rename("blocks.{i}.mlp.down.{p}", LAYER + "mlp.Wo.{p}"),
        rename("final_norm.{p}", "final_norm.{p}"),
        drop(LAYER + "attn.rotary_emb.inv_freq", why="rotary frequencies are computed from config.json"),
        drop("head.{*}", why="the prediction head does not take part in embeddings", outside=True),
        drop("decoder.{p}", why="the masked language model's output does not take part in embeddings", outside=True),
        drop("classifier.{p}", why="a classification head does not take part in embeddings", outside=True),
    ),
    heads=(
        normed_head("ModernBertForSequenceClassification", on="vectors"),
        normed_head("ModernBertForTokenClassification", on="tokens"),
        normed_mlm_head("ModernBertForMaskedLM"),
    ),
    # Dropout, initialisation, losses, and how the reference computes; heads are dropped above; pad tokens never reach
    # a packed batch; checkpoints carry position_embedding_type and layer_norm_eps, which the reference does not read.
    irrelevant=frozenset(
        """
        attention_dropout classifier_activation classifier_bias classifier_dropout classifier_pooling cls_token_id
        decoder_bias deterministic_flash_attn embedding_dropout initializer_cutoff_factor layer_norm_eps mlp_dropout
        pad_token_id position_embedding_type reference_compile repad_logits_with_grad sparse_pred_ignore_index
        sparse_prediction
        """.split()
    ),
    tiny={
        "model_type": "modernbert",
        "architectures": ["ModernBertModel"],
        "vocab_size": 61,
        "hidden_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": 5,
        "intermediate_size": 36,
        "max_position_embeddings": 30,
        "norm_eps": 1e-3,
        "norm_bias": True,
        "attention_bias": True,
        "mlp_bias": True,
        "local_attention": 9,
        "global_attn_every_n_layers": 2,
        "global_rope_theta": 700.0,
        "local_rope_theta": 30.0,
        "pad_token_id": 7,
    },
    note="global and local layers; local_attention is the whole width of the window",
)
