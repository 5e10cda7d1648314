"""A causal language model as a reranker: the tokens whose logits sentence-transformers' LogitScore compares."""

from typing import Any

from toolkit.checkpoint import Checkpoint
from toolkit.errors import CheckpointError, UnsupportedError
from toolkit.modules import read_modules
from toolkit.pylate import ALIASES
from toolkit.spec import EncoderSpec
from toolkit.tokenizer import read_tokenizer

__all__ = ["read_words"]

_ST_CONFIG = "config_sentence_transformers.json"
# What a CrossEncoder looks at where a causal language model comes without modules.
_DEFAULT = ("yes", "no")


def _folder(checkpoint: Checkpoint) -> str | None:
    modules = read_modules(checkpoint, ALIASES) if checkpoint.has("modules.json") else []
    folders = [folder for kind, folder in modules if kind == "LogitScore"]
    if len(folders) > 1:
        raise UnsupportedError("modules.json: a second LogitScore is not supported")
    return folders[0] if folders else None


def read_words(checkpoint: Checkpoint, spec: EncoderSpec) -> tuple[int, ...]:
    """The id of the token that speaks for a pair and, if there is one, of that which speaks against it.

    Without `modules.json` these are "yes" and "no", as in sentence-transformers.

    Raises:
        CheckpointError: a field is malformed.
        UnsupportedError: there are other modules but no LogitScore, the modules are not a CrossEncoder's, or the
            tokenizer lacks one of the words.
    """
    folder = _folder(checkpoint)
    if folder is None:
        return _default_words(checkpoint)
    kind = checkpoint.json(_ST_CONFIG).get("model_type") if checkpoint.has(_ST_CONFIG) else None
    if kind != "CrossEncoder":
        raise UnsupportedError(
            f"{_ST_CONFIG}: model_type = {kind!r}: only a CrossEncoder's LogitScore is read, and sentence-transformers "
            "would put another one in its place"
        )
    name = f"{folder}/config.json"
    config = checkpoint.json(name) if checkpoint.has(name) else {}
    unknown = sorted(set(config) - {"true_token_id", "false_token_id", "module_input_name"})
    if unknown:
        raise UnsupportedError(f"{name}: unknown field {unknown[0]!r}")
    source = config.get("module_input_name", "causal_logits")
    if source != "causal_logits":
        raise UnsupportedError(f"{name}: module_input_name = {source!r} is not supported")
    words: list[Any] = [config.get("true_token_id")]
    if config.get("false_token_id") is not None:
        words.append(config["false_token_id"])
    for word in words:
        if type(word) is not int or not 0 <= word < spec.embedding.vocab_size:
            raise CheckpointError(
                f"{name}: token id {word!r}, expected one below {spec.embedding.vocab_size} (vocab_size)"
            )
    return tuple(words)


def _default_words(checkpoint: Checkpoint) -> tuple[int, ...]:
    advice = "save it as a CrossEncoder with a LogitScore module, which names the tokens to compare"
    if checkpoint.has("modules.json"):
        raise UnsupportedError(
            f"modules.json: there is no LogitScore module: a language model alone scores no pairs; {advice}"
        )
    first = checkpoint.architectures[0]
    if not first.endswith("ForCausalLM"):
        raise UnsupportedError(
            f"config.json: sentence-transformers takes {first} for no causal language model: {advice}"
        )
    tokenizer, _ = read_tokenizer(checkpoint, lower_case=False)
    ids: list[int] = [tokenizer.convert_tokens_to_ids(word) for word in _DEFAULT]
    for word, id in zip(_DEFAULT, ids, strict=True):
        if id is None or id == tokenizer.unk_token_id:
            raise UnsupportedError(
                f"the tokenizer has no token {word!r} for a language model's score of pairs: {advice}"
            )
    return tuple(ids)
