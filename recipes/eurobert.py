"""EuroBERT (Boizard et al., 2025, https://arxiv.org/abs/2503.05500); reference: transformers' EuroBertModel."""

from toolkit.decoders import LAYER_RULES
from toolkit.heads import late_head, token_head, vocabulary_head
from toolkit.recipe import ConfigReader, Recipe
from toolkit.spec import AttentionSpec, BlockSpec, EmbeddingSpec, EncoderSpec, MlpSpec, NormSpec, stack
from toolkit.weights import drop


def spec(config: ConfigReader) -> EncoderSpec:
    """Effective configuration; defaults are EuroBertConfig's."""
    config.neutral(is_causal=False, partial_rotary_factor=(None, 1.0))
    hidden = config.integer("hidden_size", 768)
    heads = config.integer("num_attention_heads", 12)
    head_dim = config.head_dim(hidden, heads, "head_dim")
    norm = NormSpec(eps=config.positive("rms_norm_eps", 1e-5), kind="rms", bias=False)
    attention_bias = config.boolean("attention_bias", default=False)
    mlp_bias = config.boolean("mlp_bias", default=False)
    block = BlockSpec(
        arrangement="pre",
        attention=AttentionSpec(
            heads=heads,
            kv_heads=config.kv_heads(heads),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            causal=False,
            bias=attention_bias,
            out_bias=attention_bias,
            rope=config.rope(head_dim, 10_000.0),
        ),
        mlp=MlpSpec(
            width=config.integer("intermediate_size", 3072),
            activation=config.activation("hidden_act", "silu"),
            bias=mlp_bias,
            out_bias=mlp_bias,
            gate="first",
        ),
        norm=norm,
    )
    blocks = stack(config.integer("num_hidden_layers", 12, maximum=10_000), block)
    return EncoderSpec(
        hidden=hidden,
        blocks=blocks,
        schedule=tuple(block.name for block in blocks),
        usable_length=config.integer("max_position_embeddings", 8192),
        embedding=EmbeddingSpec(vocab_size=config.integer("vocab_size", 128256), width=hidden, norm=None),
        final_norm=norm,
    )


RECIPE = Recipe(
    model_type="eurobert",
    classes=("EuroBertModel", "EuroBertForMaskedLM"),
    tasks=("embed",),
    spec=spec,
    prefixes=("model.",),
    aliases={},
    rules=(
        *LAYER_RULES,
        drop("lm_head.{p}", why="the masked language model's head does not take part in embeddings", outside=True),
        drop("dense.{p}", why="a classification head does not take part in embeddings", outside=True),
        drop("classifier.{p}", why="a classification head does not take part in embeddings", outside=True),
    ),
    heads=(
        late_head("EuroBertForSequenceClassification"),
        token_head("EuroBertForTokenClassification"),
        vocabulary_head(
            "EuroBertForMaskedLM",
            before=lambda config, spec: (),
            rules=(),
            decoder="lm_head",
            biased=("mlp_bias", False),
            tied=False,
        ),
    ),
    # Dropout is off at inference; pad and mask tokens are ordinary rows of the table; the reference does not read
    # pretraining_tp; the other ones belong to heads, which are dropped above, or to the tokenizer.
    irrelevant=frozenset(
        """
        attention_dropout bos_token classifier_pooling clf_pooling eos_token hidden_dropout mask_token mask_token_id
        pad_token pad_token_id pretraining_tp
        """.split()
    ),
    tiny={
        "model_type": "eurobert",
        "architectures": ["EuroBertModel"],
        "vocab_size": 61,
        "hidden_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "intermediate_size": 36,
        "max_position_embeddings": 26,
        "rms_norm_eps": 1e-3,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_theta": 300.0,
        "pad_token_id": 7,
    },
    note="rotary positions; grouped key and value heads; bidirectional",
)
