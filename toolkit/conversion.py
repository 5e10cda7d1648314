"""`toolkit convert`: checkpoint → recipe → weights → artifact, verified before it is put in place."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError

from toolkit.artifact import DTYPES, MANIFEST, SCHEMA, Manifest, atomic_folder, refuse_occupied
from toolkit.attention import choose_backend
from toolkit.checkpoint import Checkpoint, open_checkpoint
from toolkit.config import ConfigReader
from toolkit.decoders import read_ends
from toolkit.errors import ArtifactError, CheckpointError, InputError, ParityError, UnsupportedError
from toolkit.heads import TaskHead, words_head
from toolkit.logit_score import read_words
from toolkit.messages import Messages, check_pairs, read_messages
from toolkit.modules import read_modules, stored_name
from toolkit.multivector import MultiVector
from toolkit.nn.head import build_head
from toolkit.nn.model import build_encoder, part_groups, part_shapes
from toolkit.pipeline import ReadPipeline, checkpoint_kind, is_reranker, read_pipeline
from toolkit.precision import PROBE_TEXTS, probe_float16
from toolkit.pylate import ALIASES, register_prefixes
from toolkit.recipe import Recipe
from toolkit.registry import RegisteredRecipe, find_recipe
from toolkit.scoring import count_labels, read_scoring
from toolkit.spec import EncoderSpec
from toolkit.stanford import names_stanford
from toolkit.tokenizer import TokenizerSpec, read_tokenizer, text_limit
from toolkit.versions import library_versions
from toolkit.weights import LoadedWeights, load_weights, rename

__all__ = ["TASKS", "ConversionReport", "convert"]

TASKS = ("embed", "rerank", "classify", "token-classify", "sparse", "multi-vector", "generate")
_SCORED = ("rerank", "classify", "token-classify")


@dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """What a conversion did. `parity` is None if it was not verified."""

    out: Path
    manifest: Manifest
    parity: Any

    def to_dict(self) -> dict[str, Any]:
        """Plain dict, for JSON."""
        return {
            "out": str(self.out),
            "manifest": json.loads(self.manifest.to_json()),
            "parity": self.parity.to_dict() if self.parity is not None else None,
        }


def convert(
    source: str,
    out: str | Path | None = None,
    task: str = "auto",
    dtype: str = "auto",
    verify: bool = True,
    force: bool = False,
    revision: str | None = None,
    recipe: str | None = None,
    *,
    normalize: bool = False,
    device: str = "auto",
    on_stage: Callable[[str], None] = lambda stage: None,
) -> ConversionReport:
    """Convert a checkpoint into a folder that `toolkit.load` takes.

    Args:
        source: hub id, folder, or `package:NAME[/subfolder]`.
        out: the folder to write; by default `./NAME-toolkit`.
        task: what the module is for; "auto" reads it off the checkpoint.
        dtype: "float32", "float16", "bfloat16", or "auto" for the checkpoint's own.
        verify: compare with transformers and sentence-transformers before anything is put in place.
        force: replace an existing artifact at `out`.
        revision: branch, tag or commit of a hub id.
        recipe: Python file with a recipe of your own; it is executed.
        normalize: scale vectors to length 1 after truncation, whatever the checkpoint does; recorded in the artifact.
        device: where the verification runs.
        on_stage: called with a line of text whenever a stage begins.

    Raises:
        InputError: no such task, or vectors to normalize in a task that has none.
        CheckpointError: the source is missing, malformed, hostile or contradicts itself.
        UnsupportedError: it cannot be converted exactly; the message names the field or tensor.
        ArtifactError: `out` is in the way or cannot be written.
        ParityError: the numbers are not those of the reference; nothing is written.
    """
    target = Path(out) if out is not None else Path(_default_name(source))
    refuse_occupied(target, force=force)
    on_stage("reading the checkpoint")
    checkpoint = open_checkpoint(source, revision)
    if target.resolve().is_relative_to(checkpoint.root.resolve()):
        raise ArtifactError(f"{target} lies inside the checkpoint {checkpoint.root}: choose another folder")
    if checkpoint.has("modules.json"):
        read_modules(checkpoint, ALIASES)  # a module that is not served is named before config.json is looked into
    if checkpoint.config.get("auto_map"):
        # The field names Python files of the checkpoint. They are never run; the recipe stands for the model.
        on_stage("note: config.json names remote code (auto_map); it is not executed")
    registered = find_recipe(
        checkpoint.config["model_type"], recipe, checkpoint.config, lambda: checkpoint.tensors.info
    )
    plan = _choose_task(checkpoint, registered.recipe, task)
    if normalize and plan[0] != "embed":
        raise InputError(f"normalize is for task 'embed'; this one is {plan[0]!r}")
    with atomic_folder(target, force=force) as folder:
        manifest = _write(checkpoint, registered, plan, _choose_dtype(checkpoint, dtype), normalize, folder, on_stage)
        report = None
        if verify:
            from toolkit.parity import verify_folder

            report = verify_folder(folder, checkpoint.root, device=device, on_stage=on_stage)
            report.write(folder)
            if not report.passed:
                raise ParityError(f"{source}: {report.summary()}; nothing was written", report)
    return ConversionReport(out=target, manifest=manifest, parity=report)


def _default_name(source: str) -> str:
    name = source.removeprefix("package:").rstrip("/")
    parts = [part for part in name.split("/") if part not in ("", ".", "..", "model")]
    return f"{parts[-1] if parts else 'model'}-toolkit"


def _choose_task(checkpoint: Checkpoint, recipe: Recipe, task: str) -> tuple[str, TaskHead | None]:
    """The task, and the head that serves it; None for the base model."""
    if task != "auto" and task not in TASKS:
        raise InputError(f"task {task!r} is unknown; use auto, {', '.join(TASKS)}")
    classes = checkpoint.architectures
    if task == "auto":
        task = _read_task(checkpoint, recipe)
    if task not in recipe.all_tasks:
        raise UnsupportedError(
            f"task {task!r} is not supported for model_type {recipe.model_type!r}; "
            f"supported: {', '.join(recipe.all_tasks)}"
        )
    if task in recipe.base_tasks:
        return task, None
    heads = [head for head in recipe.heads if task in head.tasks]
    fitting = [head for head in heads if set(head.classes) & set(classes)]
    if not fitting:
        names = ", ".join(name for head in heads for name in head.classes)
        raise UnsupportedError(
            f"config.json: architectures = {classes} has no head for task {task!r}, but {names} have"
        )
    return task, fitting[0]


def _read_task(checkpoint: Checkpoint, recipe: Recipe) -> str:
    """What a checkpoint is for: by sentence-transformers' files, else by the class that config.json names."""
    kind = checkpoint_kind(checkpoint)
    if kind is not None:
        return kind
    if names_stanford(checkpoint):
        return "multi-vector"
    classes = checkpoint.architectures
    heads = [head for head in recipe.heads if set(head.classes) & set(classes)]
    if heads and not set(classes) & set(recipe.classes):
        tasks = heads[0].tasks
        if "generate" in tasks:
            return "embed" if checkpoint.has("modules.json") else "generate"
        return tasks[0] if len(tasks) == 1 or is_reranker(checkpoint) else tasks[1]
    foreign = [name for name in classes if name not in recipe.classes]
    if foreign and not checkpoint.has("modules.json"):
        raise UnsupportedError(
            f"config.json: architectures = {foreign} is not supported for {recipe.model_type!r}; "
            f"supported: {', '.join(recipe.all_classes)}. If the base model is what you want, say --task embed"
        )
    return "embed"


def _choose_dtype(checkpoint: Checkpoint, dtype: str) -> torch.dtype:
    """Like transformers' dtype="auto": what config.json says, else the first floating point tensor's."""
    if dtype == "auto":
        stated = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
        infos = checkpoint.tensors.info.values()
        stored = next((str(info.dtype) for info in infos if info.dtype.is_floating_point), "float32")
        dtype = str(stated or stored).removeprefix("torch.")
    if dtype not in DTYPES:
        raise UnsupportedError(f"dtype {dtype!r} is not supported; use --dtype {', '.join(DTYPES)}")
    return getattr(torch, dtype)


def _write(
    checkpoint: Checkpoint,
    registered: RegisteredRecipe,
    plan: tuple[str, TaskHead | None],
    dtype: torch.dtype,
    normalize: bool,
    folder: Path,
    on_stage: Callable[[str], None],
) -> Manifest:
    """Write everything but the parity report into `folder`."""
    recipe, (task, head) = registered.recipe, plan
    spec, unrecognised = recipe.read_config(checkpoint.config)
    by_words = head is not None and task == "rerank" and "generate" in head.tasks
    if head is not None and by_words:
        head = words_head(head, read_words(checkpoint, spec), spec)
    labels = count_labels(checkpoint.config) if head is not None else 0
    steps = head.steps(ConfigReader(checkpoint.config), spec, labels) if head is not None else ()
    read = read_pipeline(checkpoint, spec.state_width, task, steps)
    spec = _with_mix(spec, read)
    warnings = read.warnings + [
        f"config.json: the field {name!r} is not known to this recipe and has no effect" for name in unrecognised
    ]
    on_stage("converting the tokenizer")
    tokenizer, limit = read_tokenizer(checkpoint, lower_case=read.pipeline.lower_case)
    register_prefixes(tokenizer, read.prefixes)
    tokenizer_spec, clamped = _tokenizer_spec(tokenizer, limit, read.pipeline.max_seq_length, spec, recipe)
    multi_vector, notes = _multi_vector(read, tokenizer, tokenizer_spec.limit, spec)
    if multi_vector is not None and multi_vector.unattended and recipe.positions_by_mask:
        raise UnsupportedError("query_expansion: attend = False is not supported where positions skip such tokens")
    warnings += clamped + notes
    on_stage(f"converting {len(checkpoint.tensors.info)} tensors to {str(dtype).removeprefix('torch.')}")
    weights = _load_weights(checkpoint, recipe, head, spec, read, dtype)
    if dtype == torch.float16:
        on_stage("looking whether values stay within float16")
        exact = _load_weights(checkpoint, recipe, head, spec, read, torch.float32).state
        texts = tokenizer(list(PROBE_TEXTS), truncation=True, max_length=tokenizer_spec.limit)["input_ids"]
        warnings += probe_float16(spec, read.head, exact, texts)
    manifest = Manifest(
        schema=SCHEMA,
        model_type=recipe.model_type,
        architectures=checkpoint.architectures,
        recipe={"model_type": recipe.model_type, "origin": registered.origin, "sha256": registered.digest},
        task=task,
        dtype=str(dtype).removeprefix("torch."),
        spec=spec,
        head=read.head,
        pipeline=replace(read.pipeline, normalize=normalize, messages=_messages(checkpoint, task, read, tokenizer)),
        scoring=read_scoring(checkpoint, task, by_words=by_words) if task in _SCORED else None,
        multi_vector=multi_vector,
        ends=read_ends(checkpoint, spec) if task == "generate" else (),
        tokenizer=tokenizer_spec,
        usable_length=spec.usable_length,
        seam_width=spec.embedding.width,
        reference=recipe.reference,
        audit=[entry.to_dict() for entry in weights.audit],
        source={
            "name": checkpoint.source,
            "root": str(checkpoint.root.resolve()),
            "revision": checkpoint.revision,
            "modules": sorted(read.folders.values()),
            "sha256": checkpoint.sha256(sorted(read.folders.values())),
        },
        versions=library_versions(),
        warnings=warnings,
    )
    _write_files(checkpoint, manifest, weights.state, tokenizer, folder, on_stage)
    return manifest


def _messages(checkpoint: Checkpoint, task: str, read: ReadPipeline, tokenizer: Any) -> Messages | None:
    """How a reranker's texts become messages for a chat template; no other task's do."""
    messages = read_messages(checkpoint, read.options, tokenizer) if task == "rerank" else None
    if messages is not None:
        check_pairs(messages, tokenizer)
    return messages


def _with_mix(spec: EncoderSpec, read: ReadPipeline) -> EncoderSpec:
    """The encoder, with the mean over layers' states that the modules ask for."""
    if read.mix is not None and read.mix.start + read.mix.count != len(spec.schedule) + 1:
        raise CheckpointError(
            f"{read.folders['mix.']}/config.json: num_hidden_layers = {read.mix.start + read.mix.count - 1}, but the "
            f"model runs {len(spec.schedule)} layers"
        )
    if read.mix is not None and spec.projected:
        raise UnsupportedError(f"{read.folders['mix.']}: a mean of layers' states is not supported for projected ones")
    return replace(spec, mix=read.mix)


def _tokenizer_spec(
    tokenizer: Any, stored: int, configured: int | None, spec: EncoderSpec, recipe: Recipe
) -> tuple[TokenizerSpec, list[str]]:
    """How texts are cut, and warnings about it."""
    positions = spec.embedding.positions or spec.usable_length
    limit, warnings = text_limit(configured, stored, positions, spec.usable_length)
    _need_room(tokenizer, limit)
    emits = "token_type_ids" in tokenizer.model_input_names
    if emits and recipe.segments_refused:
        raise UnsupportedError(
            "tokenizer_config.json: model_input_names has token_type_ids, which this architecture would add to its "
            "input as tokens; that is not supported: remove it there"
        )
    made = TokenizerSpec(
        limit=limit,
        side=tokenizer.truncation_side,
        segments=emits and spec.embedding.segments > 0,
        special_ids=tuple(tokenizer.all_special_ids),
    )
    return made, warnings


def _need_room(tokenizer: Any, limit: int) -> None:
    specials = tokenizer.backend_tokenizer.num_special_tokens_to_add(False)
    if limit < max(specials, 1):
        raise CheckpointError(f"the length limit {limit} leaves no room for the tokenizer's {specials} special tokens")


def _multi_vector(
    read: ReadPipeline, tokenizer: Any, limit: int, spec: EncoderSpec
) -> tuple[MultiVector | None, list[str]]:
    """How queries and documents differ, and warnings; `limit` is that of texts in general."""
    if read.multi_vector is None:
        return None, []
    made, warnings = read.multi_vector.resolve(tokenizer, limit=limit, usable=spec.usable_length)
    longest = made.unattended
    unfit = (a.distance is not None or (a.reach is not None and a.reach < longest - 1) for a in spec.attentions)
    if longest and any(unfit):
        raise UnsupportedError(
            "query_expansion: attend = False is not supported where attention has a bias by distance, or a window "
            f"that does not span the expansion's {longest} tokens"
        )
    for side in (made.query, made.document):
        _need_room(tokenizer, side.limit)
        if side.expansion is not None and side.expansion.id >= spec.embedding.vocab_size:
            raise CheckpointError(
                f"query_expansion: the token's id is {side.expansion.id}, the model's vocabulary has "
                f"{spec.embedding.vocab_size}"
            )
    return made, warnings


def _load_weights(
    checkpoint: Checkpoint,
    recipe: Recipe,
    head: TaskHead | None,
    spec: EncoderSpec,
    read: ReadPipeline,
    dtype: torch.dtype,
) -> LoadedWeights:
    """The tensors of the encoder and its head, and those of modules that have folders of their own."""
    cpu = torch.device("cpu")
    encoder = build_encoder(spec, choose_backend(spec.attentions, cpu, dtype)[1])
    expected = part_shapes(encoder)
    expected |= {f"head.{name}": shapes for name, shapes in part_shapes(build_head(read.head, cpu)).items()}
    elsewhere = tuple(read.folders)
    loaded = load_weights(
        checkpoint.tensors,
        rules=(*recipe.head_rules(head, checkpoint.config), *read.rules),
        prefixes=recipe.prefixes,
        aliases=recipe.aliases,
        expected={name: shapes for name, shapes in expected.items() if not name.startswith(elsewhere)},
        dtype=dtype,
        groups=part_groups(encoder),
    )
    for prefix, folder in read.folders.items():
        names = [name for name in expected if name.startswith(prefix)]
        more = load_weights(
            checkpoint.tensors_in(folder),
            rules=tuple(rename(name, stored_name(name.removeprefix(prefix))) for name in names),
            prefixes=(),
            aliases={},
            expected={name: expected[name] for name in names},
            dtype=dtype,
        )
        audit = tuple(replace(entry, source=f"{folder}/{entry.source}") for entry in more.audit)
        loaded = LoadedWeights(state=loaded.state | more.state, audit=loaded.audit + audit)
    return loaded


def _write_files(
    checkpoint: Checkpoint,
    manifest: Manifest,
    state: dict[str, torch.Tensor],
    tokenizer: Any,
    folder: Path,
    on_stage: Callable[[str], None],
) -> None:
    on_stage("writing the artifact")
    try:
        save_torch_state_dict(state, folder)
        _save_tokenizer(tokenizer, folder)
        shutil.copyfile(checkpoint.path("config.json"), folder / "config.json")
        (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        for file in folder.iterdir():
            file.chmod(0o644)  # some of the libraries write files for the owner only
    except SafetensorError as error:
        raise ArtifactError(f"cannot write the weights into {folder.parent}: {error}") from None
    except OSError as error:
        raise ArtifactError(f"cannot write into {folder.parent}: {error.strerror or error}") from None


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise ArtifactError(f"cannot write the tokenizer into {folder.parent}: {error}") from None
