"""Late interaction checkpoints of Stanford's ColBERT, read as sentence-transformers' `MultiVectorEncoder` reads them.

config.json names the class HF_ColBERT. A projection is stored beside the base model's tensors, and a file says how
texts are prepared; most of its fields are about training, indexing and searching.
"""

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.checkpoint import PICKLED, SAFETENSORS, Checkpoint
from toolkit.errors import CheckpointError, UnsupportedError
from toolkit.pylate import PyLate
from toolkit.steps import DenseStep
from toolkit.weights import Rule, drop, rename

__all__ = ["Stanford", "is_stanford", "names_stanford", "read_stanford", "stanford_rules"]

METADATA = "artifact.metadata"
_CLASS = "HF_ColBERT"
_PROJECTION = "linear.weight"
_QUERY_LENGTH = 32
# what sentence-transformers does not do; null is a default, too
_NEUTRAL: Mapping[str, Any] = {"similarity": "cosine", "interaction": "colbert", "relu": False, "reranker": False}
_TOKENS = ("query_token_id", "doc_token_id")
_SIZES = ("query_maxlen", "doc_maxlen", "dim")
_SWITCHES: Mapping[str, bool] = {"attend_to_mask_tokens": False, "mask_punctuation": True}
# Training, data, indexing, searching, running; query_token and doc_token only name the tokens with the ids above.
_IRRELEVANT = frozenset(
    """
    bsize accumsteps lr maxsteps save_every resume warmup warmup_bert nway use_ib_negatives distillation_alpha
    ignore_scores model_name checkpoint triples collection queries index_name index_path index_bsize nbits
    kmeans_niters ncells centroid_score_threshold ndocs load_index_with_mmap overwrite root experiment index_root name
    rank nranks amp gpus avoid_fork_if_possible meta query_token doc_token
    """.split()
)


@dataclass(frozen=True, kw_only=True)
class Stanford:
    """The projection of each token, what PyLate's fields would say of texts, and warnings."""

    projection: DenseStep
    texts: PyLate
    warnings: tuple[str, ...]


def names_stanford(checkpoint: Checkpoint) -> bool:
    """Whether config.json names Stanford's class."""
    return _CLASS in checkpoint.architectures


def is_stanford(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint has this layout; with modules.json it has the usual one, whatever class it names."""
    return names_stanford(checkpoint) and not checkpoint.has("modules.json")


def stanford_rules(checkpoint: Checkpoint, *, projected: bool) -> tuple[Rule, ...]:
    """What becomes of the projection's tensor; `projected` says that the head is to have it."""
    if projected:
        return (rename("head.steps.projection.linear.weight", _PROJECTION, outside=True),)
    if names_stanford(checkpoint):
        return (drop(_PROJECTION, why=f"the projection of {_CLASS} takes no part in this", outside=True),)
    return ()


def read_stanford(checkpoint: Checkpoint, hidden: int) -> Stanford:
    """Read the projection's shape and artifact.metadata, which may be missing.

    Args:
        checkpoint: where the files are.
        hidden: width of the token states.

    Raises:
        CheckpointError: a field is malformed, the projection is missing, or they contradict each other.
        UnsupportedError: a field asks for scores that sentence-transformers does not give, or the projection lies in
            a file that it does not read.
    """
    stated = checkpoint.json(METADATA) if checkpoint.has(METADATA) else None
    fields = _read_fields(stated or {})
    projection = _read_projection(checkpoint, hidden)
    if fields["dim"] not in (None, projection.outputs):
        raise CheckpointError(f"{METADATA}: dim = {fields['dim']}, but {_PROJECTION!r} makes {projection.outputs}")
    markers = {"query": fields["query_token_id"] or "[unused0]", "document": fields["doc_token_id"] or "[unused1]"}
    length = fields["query_maxlen"] or _QUERY_LENGTH
    expansion = {"strategy": "fixed", "attend": fields["attend_to_mask_tokens"], "length": length}
    warnings = [f"no {METADATA}: queries of {_QUERY_LENGTH} tokens are assumed, as sentence-transformers does"]
    if stated is not None:
        unknown = sorted(set(stated) - set(fields) - set(_NEUTRAL) - _IRRELEVANT)
        warnings = [f"{METADATA}: the field {name!r} is not known and has no effect" for name in unknown]
    return Stanford(
        projection=projection,
        texts=PyLate(
            options={"document_length": fields["doc_maxlen"], "query_expansion": expansion},
            prefixes={kind: f"{marker} " for kind, marker in markers.items()},
            skip_words=tuple(string.punctuation) if fields["mask_punctuation"] else (),
        ),
        warnings=tuple(warnings),
    )


def _read_fields(stated: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are used. A token or a size may be null, which is none; a switch may not.

    A null mask_punctuation is true to ColBERT, and false to sentence-transformers.
    """
    for name, neutral in _NEUTRAL.items():
        if stated.get(name) not in (None, neutral):
            raise UnsupportedError(f"{METADATA}: {name} = {stated[name]!r} is not supported, only {neutral!r}")
    fields = {name: stated.get(name) for name in (*_TOKENS, *_SIZES)}
    for name in _TOKENS:
        if not isinstance(fields[name], str | None):
            raise CheckpointError(f"{METADATA}: {name} = {fields[name]!r}, expected a token")
    for name in _SIZES:
        value = fields[name]
        if value is not None and (type(value) is not int or value < 1):
            raise CheckpointError(f"{METADATA}: {name} = {value!r}, expected a positive integer")
    for name, default in _SWITCHES.items():
        fields[name] = stated.get(name, default)
        if type(fields[name]) is not bool:
            raise CheckpointError(f"{METADATA}: {name} = {fields[name]!r}, expected true or false")
    return fields


def _read_projection(checkpoint: Checkpoint, hidden: int) -> DenseStep:
    info = checkpoint.tensors.info.get(_PROJECTION)
    if info is None:
        raise CheckpointError(f"missing tensor: {_PROJECTION!r}, which architectures = [{_CLASS!r}] needs")
    if info.file.name not in (SAFETENSORS, PICKLED):
        raise UnsupportedError(
            f"{info.file.name}: sentence-transformers looks for {_PROJECTION!r} in {SAFETENSORS} or {PICKLED} only: "
            "save the model in one file"
        )
    if len(info.shape) != 2 or info.shape[1] != hidden:
        raise CheckpointError(
            f"tensor {_PROJECTION!r} has shape {info.shape}, expected [dim, {hidden}], the width of the model's states"
        )
    return DenseStep(name="projection", on="tokens", inputs=hidden, outputs=info.shape[0], bias=False)
