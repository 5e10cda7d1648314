"""Tiny, heated checkpoints, built from a recipe's own test configuration.

Default initialisation hides defects: scores and pre-activations near zero make masks, scales and activations
look alike. So query and key weights are scaled up, the MLP's input and the router of experts too, and every bias and
norm is random.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, PreTrainedTokenizerFast

from toolkit.recipe import Recipe
from toolkit.registry import all_recipes

WORDS = "the quick brown fox jumps over lazy dog a b c d e f query doc text one two three".split()
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


# What parts of parameters' names are called across the families.
QUERY_KEY = re.compile(r"query|key|q_proj|k_proj|q_lin|k_lin|Wqkv|qkv|c_attn|\.(q|k)\.|(q|k)_norm")
MLP_IN = re.compile(r"intermediate|lin1|ffn\.|\.wi|\.Wi|fc1|gate_proj|up_proj|up_gate|gated_layers|c_fc|h_to_4h")
TABLE = re.compile(r"embed|emb|shared|relative_attention_bias|wte|wpe")
ROUTER = re.compile(r"mlp\.gate\.weight")
EXPERT_OUT = re.compile(r"experts\.down_proj")
NORM = re.compile(r"norm|emb_ln|_ln\b|\bln_", re.IGNORECASE)


def heat(model: torch.nn.Module, seed: int = 0) -> None:
    draw = torch.Generator().manual_seed(seed)
    zero_is_neutral = "Gemma" in type(model).__name__  # its norms multiply by 1 + weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            if parameter.dim() == 1:
                norm_weight = NORM.search(name) is not None and name.endswith("weight")
                size = 2.0 if norm_weight and QUERY_KEY.search(name) else 1.0
                centre = 0.0 if zero_is_neutral else 1.0
                parameter.copy_(size * (centre + 0.3 * noise) if norm_weight else 0.3 * noise)
            elif TABLE.search(name):
                parameter.copy_(noise * 0.5)
            elif QUERY_KEY.search(name):
                parameter.copy_(noise * 0.02 * 12)
            elif MLP_IN.search(name):
                parameter.copy_(noise * 0.02 * 15)
            elif ROUTER.search(name):
                parameter.copy_(noise)
            elif EXPERT_OUT.search(name):
                # In 16 bits rounding may exchange the least of a token's experts for the next: that is to weigh little.
                parameter.copy_(noise * 0.01)
            else:
                parameter.copy_(noise * 0.1)


def build_model(recipe: Recipe, config: Any) -> Any:
    """The transformers model that is this recipe's reference, with random weights."""
    assert recipe.reference is not None
    maker: Any = getattr(transformers, recipe.reference)
    return maker.from_config(config) if recipe.reference.startswith("Auto") else maker(config)


def why_no_reference(recipe: Recipe) -> str | None:
    """None if the installed transformers can build this recipe's reference."""
    if recipe.reference is None:
        return "transformers has no class for it"
    if recipe.model_type not in transformers.CONFIG_MAPPING:
        return f"transformers {transformers.__version__} has no class for it yet"
    return None


def need_reference(recipe: Recipe) -> None:
    """Skip the test if the installed transformers cannot build this recipe's reference."""
    reason = why_no_reference(recipe)
    if reason is not None:
        pytest.skip(reason)


def make_tokenizer(
    *, special_tokens: bool = True, lower_case: bool = False, segments: bool = True, limit: int = 10**30
) -> PreTrainedTokenizerFast:
    """WordLevel over a few words; `segments` makes it emit token_type_ids."""
    vocab = {word: number for number, word in enumerate([*SPECIALS, *WORDS])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    if lower_case:
        backend.normalizer = normalizers.Lowercase()  # type: ignore[assignment]
    if special_tokens:
        backend.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        )
    names = ["input_ids", "attention_mask"] + (["token_type_ids"] if segments else [])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=limit,
        model_input_names=names,
    )


def make_checkpoint(
    folder: Path,
    recipe: Recipe,
    *,
    overrides: Mapping[str, Any] | None = None,
    pooling: str | None = "mean",
    normalize: bool = True,
    tokenizer: PreTrainedTokenizerFast | None = None,
    sentence_config: Mapping[str, Any] | None = None,
    prompts: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Path:
    """Write a checkpoint folder; `pooling=None` leaves the sentence-transformers files out.

    Skips the test where the installed transformers cannot build the model.
    """
    need_reference(recipe)
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    raw = {**recipe.tiny, **(overrides or {})}
    config = AutoConfig.for_model(**raw)
    model = build_model(recipe, config)
    heat(model, seed)
    model.save_pretrained(folder)
    (tokenizer or make_tokenizer(segments=not recipe.segments_refused)).save_pretrained(folder)
    if pooling is not None:
        library = "sentence_transformers.models."
        modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")][: 3 if normalize else 2]
        write_json(
            folder / "modules.json",
            [
                {"idx": k, "name": str(k), "path": path, "type": library + kind}
                for k, (path, kind) in enumerate(modules)
            ],
        )
        width = getattr(config, "word_embed_proj_dim", config.hidden_size)  # OPT's states are as wide as its table
        write_json(
            folder / "1_Pooling" / "config.json",
            {"word_embedding_dimension": width, f"pooling_mode_{POOLING_KEYS[pooling]}": True},
        )
        write_json(folder / "sentence_bert_config.json", dict(sentence_config or {}))
    if prompts is not None:
        write_json(folder / "config_sentence_transformers.json", prompts)
    return folder


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '[CLS]' }} {{ message['content'] | trim }} {{ '[SEP]' }}{% endfor %}"
    "{% if add_generation_prompt %} {{ '[CLS]' }}{% endif %}"
)


def embedding_recipes() -> list[Recipe]:
    """Every recipe whose base model serves embeddings."""
    return [entry.recipe for entry in all_recipes() if "embed" in entry.recipe.all_tasks]


def decoder_recipes() -> list[Recipe]:
    """Every recipe that generates."""
    return [entry.recipe for entry in all_recipes() if "generate" in entry.recipe.all_tasks]


def make_decoder(
    folder: Path, recipe: Recipe, *, tied: bool | None = None, overrides: Mapping[str, Any] | None = None, seed: int = 0
) -> Path:
    """Write the checkpoint of a causal language model; `tied` None leaves that to the recipe's own configuration.

    Skips the test where the installed transformers cannot build the model.
    """
    need_reference(recipe)
    name = next(name for head in recipe.heads if "generate" in head.tasks for name in head.classes)
    raw = {**recipe.tiny, "architectures": [name], **(overrides or {})}
    if tied is not None:
        raw["tie_word_embeddings"] = tied
    torch.manual_seed(seed)
    model: Any = getattr(transformers, name)(AutoConfig.for_model(**raw))
    heat(model, seed)
    head = model.get_output_embeddings()
    if head.weight is not model.get_input_embeddings().weight:
        with torch.no_grad():
            head.weight.copy_(torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed + 1)) * 0.5)
    model.generation_config.eos_token_id = [3]
    model.save_pretrained(folder)
    tokenizer = make_tokenizer(segments=False)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


POOLING_KEYS = {
    "mean": "mean_tokens",
    "cls": "cls_token",
    "max": "max_tokens",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean": "weightedmean_tokens",
    "lasttoken": "lasttoken",
}


def write_json(file: Path, data: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(data), encoding="utf-8")


def edit_json(file: Path, **changes: Any) -> None:
    """Set fields of a JSON file; `...` removes one."""
    data = json.loads(file.read_text(encoding="utf-8"))
    for key, value in changes.items():
        if value is ...:
            data.pop(key, None)
        else:
            data[key] = value
    write_json(file, data)


def add_layer_mix(folder: Path, weights: list[float], width: int = 40) -> None:
    """Put a WeightedLayerPooling that starts at depth 1 between the model and the pooling of a checkpoint."""
    kinds = [("", "Transformer"), ("1_Mix", "WeightedLayerPooling"), ("1_Pooling", "Pooling")]
    modules = [
        {"idx": k, "name": str(k), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for k, (path, kind) in enumerate(kinds)
    ]
    write_json(folder / "modules.json", modules)
    options = {"word_embedding_dimension": width, "num_hidden_layers": len(weights), "layer_start": 1}
    write_json(folder / "1_Mix" / "config.json", options)
    save_file({"layer_weights": torch.tensor(weights)}, folder / "1_Mix" / "model.safetensors")
    edit_json(folder / "config.json", output_hidden_states=True)
