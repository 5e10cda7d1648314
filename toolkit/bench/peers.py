"""The libraries that we are measured against, on the source checkpoint."""

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.artifact import Artifact
from toolkit.parity.references import SentenceTransformersReference, TransformersReference
from toolkit.steps import HeadSpec, NormalizeStep, PoolingStep

__all__ = ["Encode", "Peers"]

Encode = Callable[[list[str]], Tensor]


class Peers:
    """The reference libraries on the source checkpoint."""

    def __init__(
        self, checkpoint: Path, artifact: Artifact, device: torch.device, on_stage: Callable[[str], None]
    ) -> None:
        self._device = device
        self.sizes = (4, 8, 16, 32, 64) if device.type == "cpu" else (32, 64, 128, 256, 512)
        on_stage("loading the peers")
        self._st = SentenceTransformersReference(checkpoint, artifact.dtype, device, attention="sdpa")
        self._st.limit_length(artifact.manifest.tokenizer.limit)
        name = artifact.manifest.reference or "AutoModel"
        self._model = TransformersReference(checkpoint, artifact.dtype, device, attention="sdpa", name=name)
        self._onnx = None
        if device.type == "cpu" and artifact.dtype == torch.float32:
            missing = [name for name in ("onnxruntime", "onnxscript") if find_spec(name) is None]
            if not _simple(artifact.manifest.head):
                on_stage("note: onnxruntime is measured with mean or CLS pooling only")
            elif missing:
                on_stage(f"note: {' and '.join(missing)} not installed, onnxruntime is not measured")
            else:
                on_stage("exporting the source model to onnx for onnxruntime")
                self._onnx = _OnnxPeer(self._model.model, artifact)

    @property
    def attention(self) -> str:
        """The attention that transformers' model runs, as it reports it."""
        return self._model.model.config._attn_implementation

    def encoders(self) -> list[tuple[str, str, Encode]]:
        """(name, setting, texts → vectors) for batches of several sizes."""
        found: list[tuple[str, str, Encode]] = [
            ("sentence-transformers", f"batch {size}", lambda texts, size=size: self._st.vectors(texts, size))
            for size in self.sizes
        ]
        if self._onnx is not None:
            onnx = self._onnx
            found += [
                ("onnxruntime", f"sorted, batch {size}", lambda texts, size=size: onnx.vectors(texts, size))
                for size in (1, *self.sizes)
            ]
        return found

    def single(self) -> list[tuple[str, str, Encode]]:
        """(name, setting, texts → vectors) for one text."""
        found: list[tuple[str, str, Encode]] = [("sentence-transformers", "encode", lambda t: self._st.vectors(t, 1))]
        if self._onnx is not None:
            onnx = self._onnx
            found.append(("onnxruntime", "", lambda texts: onnx.vectors(texts, 1)))
        return found

    def padded(self, ids: Sequence[Sequence[int]], size: int) -> Callable[[], None]:
        """transformers over padded batches of `size`, sorted by length; tensors are on the device beforehand."""
        return self._model.padded(ids, size)


def _simple(head: HeadSpec) -> bool:
    """Whether the vectors are a mean or the first token's state, perhaps scaled to length 1."""
    pooling, *rest = head.steps
    return pooling in (PoolingStep(modes=("mean",)), PoolingStep(modes=("cls",))) and rest in (
        [],
        [NormalizeStep(on="vectors")],
    )


class _OnnxPeer:
    """onnxruntime on a plain export of transformers' model, with mean pooling and normalisation in numpy."""

    def __init__(self, model: Any, artifact: Artifact) -> None:
        import onnxruntime
        from tokenizers import Tokenizer

        manifest = artifact.manifest
        self._tokenizer = Tokenizer.from_file(str(artifact.folder / "tokenizer.json"))
        self._tokenizer.enable_truncation(manifest.tokenizer.limit, direction=manifest.tokenizer.side)
        pooling, *rest = manifest.head.steps
        assert isinstance(pooling, PoolingStep)
        self._pooling, self._normalize = pooling.modes[0], bool(rest)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.onnx"
            _export(model, file, manifest.usable_length)
            self._session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def vectors(self, texts: list[str], size: int) -> Tensor:
        import numpy as np

        ids = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts)]
        order = sorted(range(len(ids)), key=lambda k: len(ids[k]), reverse=True)
        result = torch.empty(0)
        for start in range(0, len(order), size):
            members = order[start : start + size]
            shape = (len(members), len(ids[members[0]]))
            tokens, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
            for row, member in enumerate(members):
                tokens[row, : len(ids[member])] = ids[member]
                mask[row, : len(ids[member])] = 1
            feed = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": np.zeros_like(tokens)}
            states: Any = self._session.run(None, feed)[0]
            pooled = (
                states[:, 0] if self._pooling == "cls" else (states * mask[..., None]).sum(1) / mask.sum(1)[:, None]
            )
            if self._normalize:
                pooled = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
            if not len(result):
                result = torch.empty(len(texts), pooled.shape[1])
            result[members] = torch.from_numpy(pooled.astype(np.float32))
        return result


def _export(model: Any, file: Path, longest: int) -> None:
    """A plain export of transformers' model by torch.onnx's dynamo exporter, with free batch and length."""

    class States(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
            output = self.inner(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
            return output.last_hidden_state

    names = ["input_ids", "attention_mask", "token_type_ids"]
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=longest)
    # three tensors of their own: an exporter takes inputs that are one object for one input
    example = tuple(torch.ones(2, 8, dtype=torch.long) for _ in names)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            States().eval(),
            example,
            str(file),
            dynamo=True,
            dynamic_shapes=({0: batch, 1: length},) * 3,
            input_names=names,
            output_names=["states"],
            verbose=False,
        )
