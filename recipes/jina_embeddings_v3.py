"""Jina Embeddings v3 (Sturua et al., 2024, https://arxiv.org/abs/2409.10173): XLM-RoBERTa with rotary positions.

Reference: transformers' JinaEmbeddingsV3Model. The original checkpoint's LoRA adapters are refused.
"""

from toolkit.heads import lm_head, sequence_head, token_head
from toolkit.recipe import ConfigReader, Recipe
from toolkit.spec import BlockSpec, EmbeddingSpec, EncoderSpec, MlpSpec, NormSpec, self_attention, stack
from toolkit.weights import drop, either, fuse, refuse, rename

# The original checkpoint's names, which `save_pretrained` writes too, and those of the transformers class.
LAYER, NATIVE = "encoder.layers.{i}.", "layers.{i}."
LORA = "LoRA adapters are not supported: merge the task's adapter into the weights"


def spec(config: ConfigReader) -> EncoderSpec:
    """Effective configuration; defaults are JinaEmbeddingsV3Config's."""
    config.neutral(position_embedding_type="rotary", partial_rotary_factor=1.0, lora_adaptations=None)
    hidden = config.integer("hidden_size", 1024)
    heads = config.integer("num_attention_heads", 16)
    head_dim = config.head_dim(hidden, heads, "head_dim")
    norm = NormSpec(eps=config.positive("layer_norm_eps", 1e-5))
    rope = config.rope(head_dim, 20_000.0, ("rope_theta", "rotary_emb_base"))
    block = BlockSpec(
        arrangement="post",
        attention=self_attention(heads, head_dim, bias=True, rope=rope),
        mlp=MlpSpec(
            width=config.integer("intermediate_size", 4096),
            activation=config.activation("hidden_act", "gelu"),
            bias=True,
            out_bias=True,
        ),
        norm=norm,
    )
    blocks = stack(config.integer("num_hidden_layers", 24, maximum=10_000), block)
    return EncoderSpec(
        hidden=hidden,
        blocks=blocks,
        schedule=tuple(block.name for block in blocks),
        usable_length=config.integer("max_position_embeddings", 8194),
        embedding=EmbeddingSpec(
            vocab_size=config.integer("vocab_size", 250002),
            width=hidden,
            segments=config.integer("type_vocab_size", 1),
            norm=norm,
        ),
    )


RECIPE = Recipe(
    model_type="jina_embeddings_v3",
    classes=("JinaEmbeddingsV3Model", "JinaEmbeddingsV3ForMaskedLM"),
    tasks=("embed",),
    spec=spec,
    prefixes=("roberta.",),
    aliases={},
    rules=(
        rename("embeddings.token.weight", "embeddings.word_embeddings.weight"),
        rename("embeddings.segment.weight", "embeddings.token_type_embeddings.weight"),
        *either("embeddings.norm.{p}", "emb_ln.{p}", "embeddings.LayerNorm.{p}"),
        rename("blocks.{i}.attention.qkv.{p}", LAYER + "mixer.Wqkv.{p}"),
        fuse("blocks.{i}.attention.qkv.{p}", *(f"{NATIVE}self_attn.{x}_proj.{{p}}" for x in "qkv")),
        *either("blocks.{i}.attention.out.{p}", LAYER + "mixer.out_proj.{p}", NATIVE + "self_attn.o_proj.{p}"),
        *either("blocks.{i}.attention_norm.{p}", LAYER + "norm1.{p}", NATIVE + "post_attention_layernorm.{p}"),
        *either("blocks.{i}.mlp.up.{p}", LAYER + "mlp.fc1.{p}", NATIVE + "mlp.fc1.{p}"),
        *either("blocks.{i}.mlp.down.{p}", LAYER + "mlp.fc2.{p}", NATIVE + "mlp.fc2.{p}"),
        *either("blocks.{i}.mlp_norm.{p}", LAYER + "norm2.{p}", NATIVE + "post_mlp_layernorm.{p}"),
        drop("rotary_emb.inv_freq", why="a buffer; rotary positions are computed from the configuration"),
        drop("pooler.dense.{p}", why="the vectors are pooled from token states, not by the pooler"),
        drop("lm_head.{*}", why="the masked language model's head does not take part in embeddings", outside=True),
        drop("classifier.{*}", why="a classification head does not take part in embeddings", outside=True),
        drop("qa_outputs.{p}", why="a question answering head does not take part in embeddings", outside=True),
        refuse("{*}.lora_{*}", why=LORA),
    ),
    heads=(
        sequence_head("JinaEmbeddingsV3ForSequenceClassification", "tanh", "classifier.dense", "classifier.out_proj"),
        token_head("JinaEmbeddingsV3ForTokenClassification"),
        lm_head("JinaEmbeddingsV3ForMaskedLM"),
    ),
    # Dropout is off at inference; positions do not skip padding, unlike RoBERTa's; how flash attention and the
    # adapters were set up matters only where there are adapters, which `lora_adaptations` and the tensors tell.
    irrelevant=frozenset(
        """
        hidden_dropout_prob attention_probs_dropout_prob classifier_dropout pad_token_id use_flash_attn lora_rank
        lora_alpha lora_dropout_p lora_main_params_trainable load_trained_adapters matryoshka_dimensions
        """.split()
    ),
    tiny={
        "model_type": "jina_embeddings_v3",
        "architectures": ["JinaEmbeddingsV3Model"],
        "vocab_size": 61,
        "hidden_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 5,
        "intermediate_size": 56,
        "max_position_embeddings": 26,
        "type_vocab_size": 3,
        "layer_norm_eps": 1e-3,
        "pad_token_id": 4,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 1.75},
    },
    note="rotary positions; no LoRA adapters",
)
