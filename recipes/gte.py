"""GTE, whose original code calls itself "new" (Zhang et al., 2024, https://arxiv.org/abs/2407.19669).

Reference: transformers' GteModel. Checkpoints with model_type "new" hold the same module; their code is never run.
"""

from dataclasses import replace
from functools import partial

from toolkit.heads import lm_head, sequence_head, token_head
from toolkit.recipe import ConfigReader, Recipe
from toolkit.spec import BlockSpec, EmbeddingSpec, EncoderSpec, MlpSpec, NormSpec, self_attention, stack
from toolkit.weights import drop, either, fuse, rename

# The original checkpoints' names, which `save_pretrained` writes too, and those of the transformers class.
LAYER, NATIVE = "encoder.layer.{i}.", "layers.{i}."


def spec(
    config: ConfigReader,
    *,
    vocab_size: int = 250048,
    length: int = 8192,
    base: float = 160_000.0,
    ntk: bool = False,
) -> EncoderSpec:
    """Effective configuration; defaults are GteConfig's. `ntk` says whether static NTK scaling has a meaning."""
    config.neutral(layer_norm_type="layer_norm", position_embedding_type="rope", partial_rotary_factor=1.0)
    config.neutral(logn_attention_scale=False, logn_attention_clip1=False)
    hidden = config.integer("hidden_size", 768)
    heads = config.integer("num_attention_heads", 12)
    head_dim = config.head_dim(hidden, heads, "head_dim")
    norm = NormSpec(eps=config.positive("layer_norm_eps", 1e-12))
    rope = config.rope(head_dim, base, more=("ntk",) if ntk else ())
    block = BlockSpec(
        arrangement="post",
        attention=self_attention(heads, head_dim, bias=True, rope=rope),
        mlp=MlpSpec(
            width=config.integer("intermediate_size", 3072),
            activation=config.activation("hidden_act", "gelu"),
            bias=False,
            out_bias=True,
            gate="second",
        ),
        norm=norm,
    )
    blocks = stack(config.integer("num_hidden_layers", 12, maximum=10_000), block)
    return EncoderSpec(
        hidden=hidden,
        blocks=blocks,
        schedule=tuple(block.name for block in blocks),
        usable_length=config.integer("max_position_embeddings", length),
        embedding=EmbeddingSpec(
            vocab_size=config.integer("vocab_size", vocab_size),
            width=hidden,
            segments=config.integer("type_vocab_size", 1, minimum=0),
            norm=norm,
        ),
    )


GTE = Recipe(
    model_type="gte",
    classes=("GteModel", "GteForMaskedLM"),
    tasks=("embed",),
    spec=spec,
    prefixes=("gte.", "new."),
    aliases={},
    rules=(
        rename("embeddings.token.weight", "embeddings.word_embeddings.weight"),
        rename("embeddings.segment.weight", "embeddings.token_type_embeddings.weight"),
        rename("embeddings.norm.{p}", "embeddings.LayerNorm.{p}"),
        rename("blocks.{i}.attention.qkv.{p}", LAYER + "attention.qkv_proj.{p}"),
        fuse("blocks.{i}.attention.qkv.{p}", *(f"{LAYER}attention.{x}_proj.{{p}}" for x in "qkv")),
        fuse("blocks.{i}.attention.qkv.{p}", *(f"{NATIVE}self_attn.{x}_proj.{{p}}" for x in "qkv")),
        *either("blocks.{i}.attention.out.{p}", LAYER + "attention.o_proj.{p}", NATIVE + "self_attn.o_proj.{p}"),
        *either("blocks.{i}.attention_norm.{p}", LAYER + "attn_ln.{p}", NATIVE + "post_attention_layernorm.{p}"),
        rename("blocks.{i}.mlp.up.weight", LAYER + "mlp.up_gate_proj.weight"),
        fuse("blocks.{i}.mlp.up.weight", NATIVE + "mlp.up_proj.weight", NATIVE + "mlp.gate_proj.weight"),
        *either("blocks.{i}.mlp.down.{p}", LAYER + "mlp.down_proj.{p}", NATIVE + "mlp.down_proj.{p}"),
        *either("blocks.{i}.mlp_norm.{p}", LAYER + "mlp_ln.{p}", NATIVE + "post_mlp_layernorm.{p}"),
        drop("embeddings.rotary_emb.inv_freq", why="a buffer; rotary positions are computed from the configuration"),
        drop("rotary_emb.inv_freq", why="a buffer; rotary positions are computed from the configuration"),
        drop("pooler.dense.{p}", why="the vectors are pooled from token states, not by the pooler"),
        drop("lm_head.{*}", why="the masked language model's head does not take part in embeddings", outside=True),
        drop("classifier.{p}", why="a classification head does not take part in embeddings", outside=True),
    ),
    heads=(
        sequence_head("GteForSequenceClassification", "tanh", "pooler.dense", dense_inside=True),
        token_head("GteForTokenClassification"),
        lm_head("GteForMaskedLM", norm=("lm_head.norm", "lm_head.layer_norm"), bias=""),
    ),
    # Dropout is off at inference and pad tokens never reach a packed batch; the others choose how the original code
    # stores or runs the same computation.
    irrelevant=frozenset(
        """
        hidden_dropout_prob attention_probs_dropout_prob classifier_dropout pad_token_id pack_qkv unpad_inputs
        use_memory_efficient_attention
        """.split()
    ),
    tiny={"model_type": "gte", "architectures": ["GteModel"], "vocab_size": 61, "hidden_size": 40, "pad_token_id": 5}
    | {"num_hidden_layers": 3, "num_attention_heads": 5, "intermediate_size": 56, "max_position_embeddings": 26}
    | {"type_vocab_size": 3, "layer_norm_eps": 1e-3, "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    note="rotary positions; with or without a segment table",
)

# Defaults of the original NewConfig.
new_spec = partial(spec, vocab_size=30528, length=2048, base=10_000.0, ntk=True)
NEW = replace(GTE, model_type="new", classes=("NewModel", "NewForMaskedLM"), spec=new_spec, reference=None, heads=())
RECIPES = (GTE, replace(NEW, tiny={**GTE.tiny, "model_type": "new", "architectures": ["NewModel"]}))
