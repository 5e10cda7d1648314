"""BERT (Devlin et al., 2018, https://arxiv.org/abs/1810.04805); reference: transformers' BertModel."""

from toolkit.heads import mlm_head, sequence_head, token_head
from toolkit.recipe import ConfigReader, Recipe
from toolkit.spec import BlockSpec, EmbeddingSpec, EncoderSpec, MlpSpec, NormSpec, self_attention, stack
from toolkit.weights import drop, fuse, rename

LAYER = "encoder.layer.{i}."


def spec(
    config: ConfigReader,
    *,
    vocab_size: int = 30522,
    hidden_size: int = 768,
    heads: int = 12,
    inner: int = 3072,
    layers: int = 12,
    eps: float = 1e-12,
    position_type: str = "absolute",
    activation: str = "gelu",
    segments: int | None = 2,
) -> EncoderSpec:
    """Effective configuration; defaults are BertConfig's. `segments` is None for a family without a segment table."""
    config.neutral(position_embedding_type=position_type)
    hidden = config.integer("hidden_size", hidden_size)
    heads = config.integer("num_attention_heads", heads)
    head_dim = config.head_dim(hidden, heads)
    positions = config.integer("max_position_embeddings", 512)
    norm = NormSpec(eps=config.positive("layer_norm_eps", eps))
    block = BlockSpec(
        arrangement="post",
        attention=self_attention(heads, head_dim, bias=True),
        mlp=MlpSpec(
            width=config.integer("intermediate_size", inner),
            activation=config.activation("hidden_act", activation),
            bias=True,
            out_bias=True,
        ),
        norm=norm,
    )
    blocks = stack(config.integer("num_hidden_layers", layers, maximum=10_000), block)
    return EncoderSpec(
        hidden=hidden,
        blocks=blocks,
        schedule=tuple(block.name for block in blocks),
        usable_length=positions,
        embedding=EmbeddingSpec(
            vocab_size=config.integer("vocab_size", vocab_size),
            width=hidden,
            positions=positions,
            segments=config.integer("type_vocab_size", segments) if segments is not None else 0,
            norm=norm,
        ),
    )


RECIPE = Recipe(
    model_type="bert",
    classes=("BertModel", "BertForMaskedLM", "BertForPreTraining"),
    tasks=("embed",),
    spec=spec,
    prefixes=("bert.",),
    aliases={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    rules=(
        rename("embeddings.token.weight", "embeddings.word_embeddings.weight"),
        rename("embeddings.position.weight", "embeddings.position_embeddings.weight"),
        rename("embeddings.segment.weight", "embeddings.token_type_embeddings.weight"),
        rename("embeddings.norm.{p}", "embeddings.LayerNorm.{p}"),
        fuse(
            "blocks.{i}.attention.qkv.{p}",
            LAYER + "attention.self.query.{p}",
            LAYER + "attention.self.key.{p}",
            LAYER + "attention.self.value.{p}",
        ),
        rename("blocks.{i}.attention.out.{p}", LAYER + "attention.output.dense.{p}"),
        rename("blocks.{i}.attention_norm.{p}", LAYER + "attention.output.LayerNorm.{p}"),
        rename("blocks.{i}.mlp.up.{p}", LAYER + "intermediate.dense.{p}"),
        rename("blocks.{i}.mlp.down.{p}", LAYER + "output.dense.{p}"),
        rename("blocks.{i}.mlp_norm.{p}", LAYER + "output.LayerNorm.{p}"),
        drop("embeddings.position_ids", why="a buffer of consecutive numbers, not a parameter"),
        drop("embeddings.token_type_ids", why="a buffer of zeros, not a parameter"),
        drop("pooler.dense.{p}", why="the vectors are pooled from token states, not by BERT's pooler"),
        drop("cls.predictions.{*}", why="the masked language model's head takes no part in embeddings", outside=True),
        drop("cls.seq_relationship.{p}", why="the pre-training heads do not take part in embeddings", outside=True),
        drop("classifier.{p}", why="a classification head does not take part in embeddings", outside=True),
        drop("qa_outputs.{p}", why="a question answering head does not take part in embeddings", outside=True),
    ),
    heads=(
        sequence_head("BertForSequenceClassification", "tanh", "pooler.dense", dense_inside=True),
        token_head("BertForTokenClassification"),
        mlm_head("BertForMaskedLM"),
    ),
    # Dropout is off; pad tokens never reach a packed batch, and BERT's positions ignore them; Google's own
    # checkpoints describe the pooler.
    irrelevant=frozenset(
        """
        hidden_dropout_prob attention_probs_dropout_prob classifier_dropout pad_token_id directionality
        pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type
        """.split()
    ),
    tiny={"model_type": "bert", "architectures": ["BertModel"], "vocab_size": 61, "hidden_size": 40}
    | {"num_hidden_layers": 3, "num_attention_heads": 5, "intermediate_size": 56, "max_position_embeddings": 24}
    | {"type_vocab_size": 3, "layer_norm_eps": 1e-3, "pad_token_id": 7, "hidden_act": "gelu"},
    note="absolute positions; bidirectional; no pooler output",
)
