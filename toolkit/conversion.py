"""`toolkit convert`: checkpoint → recipe → weights → artifact, verified before it is put in place."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError

from toolkit.artifact import DTYPES, MANIFEST, SCHEMA, Manifest, atomic_folder, refuse_occupied
from toolkit.attention import choose_backend
from toolkit.checkpoint import Checkpoint, open_checkpoint
from toolkit.errors import ArtifactError, CheckpointError, InputError, ParityError, UnsupportedError
from toolkit.nn.model import build_encoder, part_shapes
from toolkit.pipeline import read_pipeline
from toolkit.registry import RegisteredRecipe, find_recipe
from toolkit.tokenizer import TokenizerSpec, read_tokenizer, text_limit
from toolkit.versions import library_versions
from toolkit.weights import load_weights

__all__ = ["TASKS", "ConversionReport", "convert"]

TASKS = ("embed", "rerank", "classify", "token-classify", "sparse", "multi-vector", "generate")


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
        device: where the verification runs.
        on_stage: called with a line of text whenever a stage begins.

    Raises:
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
    if checkpoint.config.get("auto_map"):
        # The field names Python files of the checkpoint. They are never run; the recipe stands for the model.
        on_stage("note: config.json names remote code (auto_map); it is not executed")
    registered = find_recipe(checkpoint.config["model_type"], recipe)
    chosen_task = _choose_task(checkpoint, registered, task)
    with atomic_folder(target, force=force) as folder:
        manifest = _write(checkpoint, registered, chosen_task, _choose_dtype(checkpoint, dtype), folder, on_stage)
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


def _choose_task(checkpoint: Checkpoint, registered: RegisteredRecipe, task: str) -> str:
    if task != "auto" and task not in TASKS:
        raise InputError(f"task {task!r} is unknown; use auto, {', '.join(TASKS)}")
    classes = checkpoint.architectures
    recipe = registered.recipe
    if task == "auto":
        foreign = [name for name in classes if name not in recipe.classes]
        if foreign and not checkpoint.has("modules.json"):
            raise UnsupportedError(
                f"config.json: architectures = {foreign} is not supported for {recipe.model_type!r}; "
                f"supported: {', '.join(recipe.classes)}. If the base model is what you want, say --task embed"
            )
        task = "embed"
    if task not in recipe.tasks:
        raise UnsupportedError(
            f"task {task!r} is not supported for model_type {recipe.model_type!r}; supported: {', '.join(recipe.tasks)}"
        )
    return task


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
    task: str,
    dtype: torch.dtype,
    folder: Path,
    on_stage: Callable[[str], None],
) -> Manifest:
    """Write everything but the parity report into `folder`."""
    recipe = registered.recipe
    spec, unrecognised = recipe.read_config(checkpoint.config)
    pipeline, warnings = read_pipeline(checkpoint, spec.hidden)
    warnings += [
        f"config.json: the field {name!r} is not known to this recipe and has no effect" for name in unrecognised
    ]
    on_stage("converting the tokenizer")
    tokenizer, tokenizer_limit = read_tokenizer(checkpoint, lower_case=pipeline.lower_case)
    limit, clamped = text_limit(pipeline.max_seq_length, tokenizer_limit, spec.embedding.positions, spec.usable_length)
    warnings += clamped
    specials = tokenizer.backend_tokenizer.num_special_tokens_to_add(False)
    if limit < max(specials, 1):
        raise CheckpointError(f"the length limit {limit} leaves no room for the tokenizer's {specials} special tokens")
    on_stage(f"converting {len(checkpoint.tensors.info)} tensors to {str(dtype).removeprefix('torch.')}")
    model = build_encoder(spec, choose_backend(spec.attentions, torch.device("cpu"), dtype)[1])
    weights = load_weights(
        checkpoint.tensors,
        rules=recipe.rules,
        prefixes=recipe.prefixes,
        aliases=recipe.aliases,
        expected=part_shapes(model),
        dtype=dtype,
    )
    manifest = Manifest(
        schema=SCHEMA,
        model_type=recipe.model_type,
        architectures=checkpoint.architectures,
        recipe={"model_type": recipe.model_type, "origin": registered.origin, "sha256": registered.digest},
        task=task,
        dtype=str(dtype).removeprefix("torch."),
        spec=spec,
        pipeline=pipeline,
        tokenizer=TokenizerSpec(
            limit=limit,
            side=tokenizer.truncation_side,
            segments="token_type_ids" in tokenizer.model_input_names,
        ),
        usable_length=spec.usable_length,
        seam_width=spec.embedding.width,
        reference=recipe.reference,
        audit=[entry.to_dict() for entry in weights.audit],
        source={
            "name": checkpoint.source,
            "root": str(checkpoint.root.resolve()),
            "revision": checkpoint.revision,
            "sha256": checkpoint.sha256(),
        },
        versions=library_versions(),
        warnings=warnings,
    )
    on_stage("writing the artifact")
    try:
        save_torch_state_dict(weights.state, folder)
        _save_tokenizer(tokenizer, folder)
        shutil.copyfile(checkpoint.path("config.json"), folder / "config.json")
        (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        for file in folder.iterdir():
            file.chmod(0o644)  # some of the libraries write files for the owner only
    except SafetensorError as error:
        raise ArtifactError(f"cannot write the weights into {folder.parent}: {error}") from None
    except OSError as error:
        raise ArtifactError(f"cannot write into {folder.parent}: {error.strerror or error}") from None
    return manifest


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise ArtifactError(f"cannot write the tokenizer into {folder.parent}: {error}") from None
