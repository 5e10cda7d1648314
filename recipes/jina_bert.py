"""JinaBERT v2 (Günther et al., 2023, https://arxiv.org/abs/2310.19923): BERT with ALiBi in the place of positions.

Its checkpoints say model_type "bert". There is only remote code for it, which is never run; the tests compare with a
reference of their own. The variant of the code model, which normalises queries and keys, is told by its tensors.
"""

from dataclasses import replace
from typing import Literal

from toolkit.config import ConfigReader
from toolkit.spec import Activation, AlibiSpec, EncoderSpec, MlpSpec, stack
from toolkit.weights import rename

from .bert import LAYER
from .bert import RECIPE as BERT
from .bert import spec as bert_spec

# What `feed_forward_type` stands for.
GATES: dict[str, Activation] = {"geglu": "gelu", "reglu": "relu"}


def spec(config: ConfigReader, *, gate: Literal["first", "second"] = "first") -> EncoderSpec:
    """BERT's without positions; `gate` is the half of the gated layer that is activated."""
    config.choice("position_embedding_type", "absolute", ("alibi",))  # absolute is the default, but plain BERT
    base = bert_spec(config, position_type="alibi")
    block = base.blocks[0]
    kind = config.choice("feed_forward_type", "original", ("original", *GATES))
    mlp = block.mlp
    if kind != "original":
        mlp = MlpSpec(width=mlp.width, activation=GATES[kind], bias=False, out_bias=True, gate=gate)
    block = replace(block, attention=replace(block.attention, distance=AlibiSpec()), mlp=mlp)
    embedding = replace(base.embedding, positions=0)
    return replace(base, blocks=stack(len(base.blocks), block), embedding=embedding)


def qk_norm_spec(config: ConfigReader) -> EncoderSpec:
    """Normalised queries and keys, a second norm after attention, and the other half of the gated layer activated."""
    base = spec(config, gate="second")
    block = base.blocks[0]
    attention = replace(block.attention, qk_norm=block.norm, qk_norm_over="all")
    block = replace(block, arrangement="post_twice", attention=attention, mlp=replace(block.mlp, bias=False))
    return replace(base, blocks=stack(len(base.blocks), block))


MLP = ("blocks.{i}.mlp.up.{p}", "blocks.{i}.mlp.down.{p}", "blocks.{i}.mlp_norm.{p}")

JINA = replace(
    BERT,
    classes=("JinaBertModel", "JinaBertForMaskedLM", *BERT.classes),
    spec=spec,
    when={"position_embedding_type": "alibi"},
    rules=(
        *BERT.rules,
        rename("blocks.{i}.mlp.up.weight", LAYER + "mlp.gated_layers.weight"),
        rename("blocks.{i}.mlp.down.{p}", LAYER + "mlp.wo.{p}"),
        rename("blocks.{i}.mlp_norm.{p}", LAYER + "mlp.layernorm.{p}"),
    ),
    # how the remote code pools in its own `encode`; here the pipeline's files say it
    irrelevant=BERT.irrelevant | {"emb_pooler"},
    tiny={**BERT.tiny, "position_embedding_type": "alibi", "feed_forward_type": "reglu"},
    note="ALiBi; remote code only, so convert with --no-verify",
    reference=None,
)

RECIPES = (
    JINA,
    replace(
        JINA,
        spec=qk_norm_spec,
        having=("attention.self.layer_norm_q.weight",),
        rules=(
            *(rule for rule in BERT.rules if rule.target not in MLP),
            rename("blocks.{i}.attention.q_norm.{p}", LAYER + "attention.self.layer_norm_q.{p}"),
            rename("blocks.{i}.attention.k_norm.{p}", LAYER + "attention.self.layer_norm_k.{p}"),
            rename("blocks.{i}.attention_norm_again.{p}", LAYER + "layer_norm_1.{p}"),
            rename("blocks.{i}.mlp.up.weight", LAYER + "mlp.up_gated_layer.weight"),
            rename("blocks.{i}.mlp.up.weight", LAYER + "mlp.up_layer.weight"),
            rename("blocks.{i}.mlp.down.{p}", LAYER + "mlp.down_layer.{p}"),
            rename("blocks.{i}.mlp_norm.{p}", LAYER + "layer_norm_2.{p}"),
        ),
        note="ALiBi, normalised queries and keys; remote code only, so convert with --no-verify",
    ),
)
