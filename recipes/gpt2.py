"""GPT-2 (Radford et al., 2019, https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf).

Reference: transformers' GPT2Model.
"""

from dataclasses import replace

from toolkit.decoders import with_blocks
from toolkit.heads import causal_head, last_token_head
from toolkit.recipe import ConfigReader, Recipe
from toolkit.spec import BlockSpec, EmbeddingSpec, EncoderSpec, MlpSpec, NormSpec, self_attention, stack
from toolkit.weights import drop, rename

LAYER = "h.{i}."


def spec(config: ConfigReader) -> EncoderSpec:
    """Effective configuration; defaults are GPT2Config's.

    `reorder_and_upcast_attn` asks for float32 scores, which ours are anyway; but with it the reference cannot run in
    float64, so that there is no proof.
    """
    config.neutral(reorder_and_upcast_attn=False)
    hidden = config.integer(("n_embd", "hidden_size"), 768)
    heads = config.integer(("n_head", "num_attention_heads"), 12)
    head_dim = config.head_dim(hidden, heads, called=("n_embd", "n_head"))
    positions = config.integer(("n_positions", "max_position_embeddings"), 1024)
    norm = NormSpec(eps=config.positive("layer_norm_epsilon", 1e-5))
    scale = head_dim**-0.5 if config.boolean("scale_attn_weights", default=True) else 1.0
    by_depth = config.boolean("scale_attn_by_inverse_layer_idx", default=False)
    causal = config.boolean("is_causal", default=True)

    def change(k: int, block: BlockSpec) -> BlockSpec:
        own = scale / (k + 1) if by_depth else scale
        return replace(block, attention=replace(block.attention, causal=causal, scale=own))

    block = BlockSpec(
        arrangement="pre",
        attention=self_attention(heads, head_dim, bias=True),
        mlp=MlpSpec(
            width=config.optional_integer("n_inner") or 4 * hidden,
            activation=config.activation("activation_function", "gelu_new"),
            bias=True,
            out_bias=True,
        ),
        norm=norm,
    )
    blocks = stack(config.integer(("n_layer", "num_hidden_layers"), 12, maximum=10_000), block)
    model = EncoderSpec(
        hidden=hidden,
        blocks=blocks,
        schedule=tuple(block.name for block in blocks),
        usable_length=positions,
        embedding=EmbeddingSpec(
            vocab_size=config.integer("vocab_size", 50257), width=hidden, positions=positions, norm=None
        ),
        final_norm=norm,
    )
    return with_blocks(model, change)


RECIPE = Recipe(
    model_type="gpt2",
    classes=("GPT2Model",),
    tasks=("embed",),
    spec=spec,
    prefixes=("transformer.",),
    aliases={},
    rules=(
        rename("embeddings.token.weight", "wte.weight"),
        rename("embeddings.position.weight", "wpe.weight"),
        rename("blocks.{i}.attention_norm.{p}", LAYER + "ln_1.{p}"),
        rename("blocks.{i}.attention.qkv.{p}", LAYER + "attn.c_attn.{p}", layout="transposed"),
        rename("blocks.{i}.attention.out.{p}", LAYER + "attn.c_proj.{p}", layout="transposed"),
        rename("blocks.{i}.mlp_norm.{p}", LAYER + "ln_2.{p}"),
        rename("blocks.{i}.mlp.up.{p}", LAYER + "mlp.c_fc.{p}", layout="transposed"),
        rename("blocks.{i}.mlp.down.{p}", LAYER + "mlp.c_proj.{p}", layout="transposed"),
        rename("final_norm.{p}", "ln_f.{p}"),
        drop(LAYER + "attn.bias", why="a buffer with the causal mask, not a parameter"),
        drop(LAYER + "attn.masked_bias", why="a buffer with the value of masked scores, not a parameter"),
        drop("lm_head.weight", why="the language model's head does not take part in embeddings", outside=True),
        drop("multiple_choice_head.{*}", why="a multiple choice head does not take part in embeddings", outside=True),
        drop("score.{p}", why="a classification head does not take part in embeddings", outside=True),
        drop("classifier.{p}", why="a classification head does not take part in embeddings", outside=True),
        drop("qa_outputs.{p}", why="a question answering head does not take part in embeddings", outside=True),
    ),
    # Dropout is off; older checkpoints name the mask's size n_ctx; the summary belongs to the multiple choice head.
    irrelevant=frozenset(
        """
        resid_pdrop embd_pdrop attn_pdrop classifier_dropout hidden_dropout pad_token_id n_ctx summary_type
        summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
        """.split()
    ),
    segments_refused=True,
    heads=(causal_head("GPT2LMHeadModel", tied=True), last_token_head("GPT2ForSequenceClassification")),
    tiny={
        "model_type": "gpt2",
        "architectures": ["GPT2Model"],
        "vocab_size": 61,
        "n_embd": 40,
        "n_layer": 3,
        "n_head": 5,
        "n_inner": 56,
        "n_positions": 26,
        "layer_norm_epsilon": 1e-3,
        "activation_function": "gelu",
        "scale_attn_by_inverse_layer_idx": True,
        "pad_token_id": 7,
    },
    note="a causal decoder with learned positions",
)
