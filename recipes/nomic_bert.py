"""NomicBERT (Nussbaum et al., 2024, https://arxiv.org/abs/2402.01613); reference: transformers' NomicBertModel.

Configurations come in the spelling of the transformers class, of the original code, or both.
"""

from toolkit.errors import CheckpointError
from toolkit.heads import mlm_head, sequence_head, token_head
from toolkit.recipe import ConfigReader, Recipe
from toolkit.spec import BlockSpec, EmbeddingSpec, EncoderSpec, MlpSpec, NormSpec, self_attention, stack
from toolkit.weights import drop, either, fuse, rename

from .bert import RECIPE as BERT

# The original checkpoints' names, which `save_pretrained` writes too, and those of the transformers class.
LAYER, NATIVE = "encoder.layers.{i}.", "layers.{i}."
HEADS = (
    sequence_head("NomicBertForSequenceClassification", "tanh", "pooler.dense", dense_inside=True),
    token_head("NomicBertForTokenClassification"),
    mlm_head("NomicBertForMaskedLM", norm="cls.predictions.transform.layer_norm"),
)


def read_mlp(config: ConfigReader, hidden: int) -> MlpSpec:
    """The original `n_inner` may be null, for four times the hidden size; its only activation here is SwiGLU."""
    activation = config.activation("hidden_act", "silu")
    config.neutral(activation_function="swiglu")
    if "activation_function" in config.raw and activation != "silu":
        raise CheckpointError(f"config.json: activation_function = 'swiglu' and hidden_act = {activation!r} contradict")
    null = "n_inner" in config.raw and config.optional_integer("n_inner") is None
    names = "intermediate_size" if null else ("intermediate_size", "n_inner")
    width = config.integer(names, 4 * hidden if null else 3072)
    return MlpSpec(width=width, activation=activation, bias=False, out_bias=False, gate="second")


def read_length(config: ConfigReader) -> int:
    """Rotary positions have no table: `n_positions`, where it is given, is how far they are meant to go.

    Dynamic scaling changes all frequencies beyond the trained length, in either spelling: then that is the end.
    """
    trained = config.integer("max_position_embeddings", 2048)
    length = config.optional_integer("n_positions") or trained
    if any("dynamic" in (config.raw.get(form) or {}).values() for form in ("rope_parameters", "rope_scaling")):
        length = min(length, trained)
    original = config.optional_integer("max_trained_positions") or 2048
    return length if config.optional_positive("rotary_scaling_factor") is None else min(length, original)


def spec(config: ConfigReader) -> EncoderSpec:
    """Effective configuration; defaults are NomicBertConfig's."""
    config.neutral(prenorm=False, parallel_block=False, causal=False, use_rms_norm=False, partial_rotary_factor=1.0)
    config.neutral(qkv_proj_bias=False, mlp_fc1_bias=False, mlp_fc2_bias=False, moe_every_n_layers=0, num_experts=0)
    config.neutral(rotary_emb_fraction=(1.0, 1), rotary_emb_interleaved=False, rotary_emb_scale_base=None)
    config.neutral(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
    hidden = config.integer(("hidden_size", "n_embd"), 768)
    heads = config.integer(("num_attention_heads", "n_head"), 12)
    head_dim = config.head_dim(hidden, heads, "head_dim")
    norm = NormSpec(eps=config.positive(("layer_norm_eps", "layer_norm_epsilon"), 1e-12))
    rope = config.rope(head_dim, 1000.0, ("rope_theta", "rotary_emb_base"))
    block = BlockSpec(
        arrangement="post",
        attention=self_attention(heads, head_dim, bias=False, rope=rope),
        mlp=read_mlp(config, hidden),
        norm=norm,
    )
    blocks = stack(config.integer(("num_hidden_layers", "n_layer"), 12, maximum=10_000), block)
    return EncoderSpec(
        hidden=hidden,
        blocks=blocks,
        schedule=tuple(block.name for block in blocks),
        usable_length=read_length(config),
        embedding=EmbeddingSpec(
            vocab_size=config.integer("vocab_size", 30528),
            width=hidden,
            segments=config.integer("type_vocab_size", 2),
            norm=norm,
        ),
    )


RECIPE = Recipe(
    model_type="nomic_bert",
    classes=("NomicBertModel", "NomicBertForMaskedLM", "NomicBertForPreTraining"),
    tasks=("embed",),
    spec=spec,
    prefixes=("nomic_bert.", "bert."),
    aliases={},
    rules=(
        *(rule for rule in BERT.rules if rule.target in ("embeddings.token.weight", "embeddings.segment.weight")),
        *either("embeddings.norm.{p}", "emb_ln.{p}", "embeddings.LayerNorm.{p}"),
        rename("blocks.{i}.attention.qkv.weight", LAYER + "attn.Wqkv.weight"),
        fuse("blocks.{i}.attention.qkv.weight", *(f"{NATIVE}self_attn.{x}_proj.weight" for x in "qkv")),
        *either("blocks.{i}.attention.out.weight", LAYER + "attn.out_proj.weight", NATIVE + "self_attn.o_proj.weight"),
        *either("blocks.{i}.attention_norm.{p}", LAYER + "norm1.{p}", NATIVE + "post_attention_layernorm.{p}"),
        fuse("blocks.{i}.mlp.up.weight", LAYER + "mlp.fc11.weight", LAYER + "mlp.fc12.weight"),
        fuse("blocks.{i}.mlp.up.weight", NATIVE + "mlp.up_proj.weight", NATIVE + "mlp.gate_proj.weight"),
        *either("blocks.{i}.mlp.down.weight", LAYER + "mlp.fc2.weight", NATIVE + "mlp.down_proj.weight"),
        *either("blocks.{i}.mlp_norm.{p}", LAYER + "norm2.{p}", NATIVE + "post_mlp_layernorm.{p}"),
        drop("rotary_emb.inv_freq", why="a buffer; rotary positions are computed"),
        drop("encoder.layers.{i}.attn.rotary_emb.inv_freq", why="a buffer; rotary positions are computed"),
        drop("pooler.dense.{p}", why="the vectors are pooled from token states, not by the pooler"),
        drop("cls.predictions.{*}", why="the masked language model's head takes no part in embeddings", outside=True),
        drop("cls.seq_relationship.{p}", why="the pre-training heads do not take part in embeddings", outside=True),
        drop("classifier.{p}", why="a classification head does not take part in embeddings", outside=True),
    ),
    heads=HEADS,
    # Dropout is off and pad tokens never reach a packed batch. How the original code ran and trained and GPT-2's
    # summaries cannot matter; the table's shape shows whether vocab_size was rounded up.
    irrelevant=frozenset(
        """
        hidden_dropout_prob attention_probs_dropout_prob classifier_dropout pad_token_id attn_pdrop embd_pdrop
        resid_pdrop dense_seq_output fused_bias_fc fused_dropout_add_ln use_flash_attn use_xentropy
        reorder_and_upcast_attn parallel_block_tied_norm pad_vocab_size_multiple last_layer_subset
        summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
        """.split()
    ),
    tiny={"model_type": "nomic_bert", "architectures": ["NomicBertModel"], "vocab_size": 61, "hidden_size": 40}
    | {"num_hidden_layers": 3, "num_attention_heads": 5, "head_dim": 12, "intermediate_size": 56, "pad_token_id": 6}
    | {"max_position_embeddings": 26, "type_vocab_size": 3, "layer_norm_eps": 1e-3, "rope_theta": 70.0},
    note="rotary positions; no layers of experts",
)
