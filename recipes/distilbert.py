"""DistilBERT (Sanh et al., 2019, https://arxiv.org/abs/1910.01108); reference: transformers' DistilBertModel."""

from toolkit.config import ConfigReader
from toolkit.heads import mlm_head, sequence_head, token_head
from toolkit.recipe import Recipe
from toolkit.spec import BlockSpec, EmbeddingSpec, EncoderSpec, MlpSpec, NormSpec, self_attention, stack
from toolkit.weights import drop, fuse, rename

from .bert import RECIPE as BERT

LAYER = "transformer.layer.{i}."


def spec(config: ConfigReader) -> EncoderSpec:
    """Effective configuration; defaults are DistilBertConfig's, whose norms have a fixed epsilon."""
    hidden = config.integer(("dim", "hidden_size"), 768)
    heads = config.integer(("n_heads", "num_attention_heads"), 12)
    head_dim = config.head_dim(hidden, heads, called=("dim", "n_heads"))
    positions = config.integer("max_position_embeddings", 512)
    norm = NormSpec(eps=1e-12)
    block = BlockSpec(
        arrangement="post",
        attention=self_attention(heads, head_dim, bias=True),
        mlp=MlpSpec(
            width=config.integer("hidden_dim", 3072),
            activation=config.activation("activation", "gelu"),
            bias=True,
            out_bias=True,
        ),
        norm=norm,
    )
    blocks = stack(config.integer(("n_layers", "num_hidden_layers"), 6, maximum=10_000), block)
    return EncoderSpec(
        hidden=hidden,
        blocks=blocks,
        schedule=tuple(block.name for block in blocks),
        usable_length=positions,
        embedding=EmbeddingSpec(
            vocab_size=config.integer("vocab_size", 30522), width=hidden, positions=positions, norm=norm
        ),
    )


RECIPE = Recipe(
    model_type="distilbert",
    classes=("DistilBertModel", "DistilBertForMaskedLM"),
    tasks=("embed",),
    spec=spec,
    prefixes=("distilbert.",),
    aliases=BERT.aliases,
    rules=(
        rename("embeddings.token.weight", "embeddings.word_embeddings.weight"),
        rename("embeddings.position.weight", "embeddings.position_embeddings.weight"),
        rename("embeddings.norm.{p}", "embeddings.LayerNorm.{p}"),
        fuse(
            "blocks.{i}.attention.qkv.{p}",
            LAYER + "attention.q_lin.{p}",
            LAYER + "attention.k_lin.{p}",
            LAYER + "attention.v_lin.{p}",
        ),
        rename("blocks.{i}.attention.out.{p}", LAYER + "attention.out_lin.{p}"),
        rename("blocks.{i}.attention_norm.{p}", LAYER + "sa_layer_norm.{p}"),
        rename("blocks.{i}.mlp.up.{p}", LAYER + "ffn.lin1.{p}"),
        rename("blocks.{i}.mlp.down.{p}", LAYER + "ffn.lin2.{p}"),
        rename("blocks.{i}.mlp_norm.{p}", LAYER + "output_layer_norm.{p}"),
        drop("embeddings.position_ids", why="a buffer of consecutive numbers, not a parameter"),
        *(
            drop(f"{name}.{{p}}", why="the masked language model's head does not take part in embeddings", outside=True)
            for name in ("vocab_transform", "vocab_layer_norm", "vocab_projector")
        ),
        *(
            drop(f"{name}.{{p}}", why="a classification head does not take part in embeddings", outside=True)
            for name in ("pre_classifier", "classifier")
        ),
        drop("qa_outputs.{p}", why="a question answering head does not take part in embeddings", outside=True),
    ),
    heads=(
        sequence_head("DistilBertForSequenceClassification", "relu", "pre_classifier"),
        token_head("DistilBertForTokenClassification"),
        mlm_head(
            "DistilBertForMaskedLM",
            dense="vocab_transform",
            norm="vocab_layer_norm",
            decoder="vocab_projector",
            bias="",
        ),
    ),
    # Dropout is off at inference; pad tokens never reach a packed batch; the table of positions is stored and read
    # whether or not its values were computed from sines; tie_weights_ concerns the language model's head.
    irrelevant=frozenset(
        """
        dropout attention_dropout qa_dropout seq_classif_dropout pad_token_id sinusoidal_pos_embds tie_weights_
        """.split()
    ),
    tiny={
        "model_type": "distilbert",
        "architectures": ["DistilBertModel"],
        "vocab_size": 63,
        "dim": 40,
        "n_layers": 3,
        "n_heads": 5,
        "hidden_dim": 56,
        "max_position_embeddings": 26,
        "activation": "relu",
        "sinusoidal_pos_embds": True,
        "pad_token_id": 6,
    },
    note="absolute positions; no segments; norms with epsilon 1e-12, whatever config.json says",
)
