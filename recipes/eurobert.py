"""EuroBERT (Boizard et al., 2025, https://arxiv.org/abs/2503.05500); reference: transformers' EuroBertModel."""

from dataclasses import replace

from toolkit.decoders import LAYER_RULES, decoder_spec, with_biases, with_blocks
from toolkit.heads import late_head, token_head, vocabulary_head
from toolkit.recipe import ConfigReader, Recipe
from toolkit.spec import EncoderSpec, RopeSpec
from toolkit.weights import drop

from .llama import RECIPE as LLAMA


def rope(config: ConfigReader, size: int) -> RopeSpec:
    """Over whole heads, of the usual types only."""
    config.neutral(partial_rotary_factor=(None, 1.0))
    return config.rope(size, 10_000.0)


def spec(config: ConfigReader) -> EncoderSpec:
    """Effective configuration; defaults are EuroBertConfig's."""
    config.neutral(is_causal=False)
    base = decoder_spec(
        config,
        hidden_size=768,
        attention_heads=12,
        kv_heads=None,
        layers=12,
        width=3072,
        length=8192,
        words=128_256,
        eps=1e-5,
        rope=rope,
    )
    both_ways = with_blocks(base, lambda k, block: replace(block, attention=replace(block.attention, causal=False)))
    return with_biases(config, both_ways)


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
    tiny={**LLAMA.tiny, "model_type": "eurobert", "architectures": ["EuroBertModel"]},
    note="rotary positions; grouped key and value heads; bidirectional",
)
