"""The reference models, loaded from the source checkpoint; each case runs alone and unpadded."""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from toolkit.errors import MissingDependencyError, ParityError, UnsupportedError
from toolkit.multivector import Kind
from toolkit.parity.loading import implementations, quiet

__all__ = [
    "CausalReference",
    "ClassifierReference",
    "CrossEncoderReference",
    "MultiVectorReference",
    "SentenceTransformersReference",
    "Sided",
    "SparseEncoderReference",
    "TextReference",
    "TransformersReference",
]


class TextReference(Protocol):
    """A library that takes texts (or pairs of texts), one at a time."""

    def limit_length(self, limit: int) -> None:
        """Use our length limit, where the checkpoint's exceeds what the model can take."""
        ...

    def tokens(self, item: Any, prompt: str) -> list[tuple[int, int]]:
        """(token id, segment id) of each token that it feeds; segments are zeros if there are none."""
        ...

    def result(self, item: Any, prompt: str) -> Tensor:
        """What it makes of the item, on the CPU."""
        ...


class TransformersReference:
    """transformers' own model in one dtype; for parity with its plain eager attention.

    `mix` is the folder of a WeightedLayerPooling, whose mean of the layers' states then stands for the last one's.
    """

    def __init__(
        self,
        root: Path,
        dtype: torch.dtype,
        device: torch.device,
        attention: str = "eager",
        name: str = "AutoModel",
        mix: str | None = None,
    ) -> None:
        import transformers

        with quiet():
            self.model: Any = getattr(transformers, name).from_pretrained(
                str(root),
                dtype=dtype,
                **implementations(attention),
                trust_remote_code=False,
                local_files_only=True,
            )
        self.model.to(device).eval()
        self._device, self._dtype = device, dtype
        self._mix = _layer_mix(root, mix).to(device, dtype) if mix is not None else None

    def table(self, ids: Sequence[int]) -> Tensor:
        """The model's own embedding of token ids: [tokens, width]."""
        with torch.inference_mode():
            return self.model.get_input_embeddings()(torch.tensor(ids, device=self._device))

    def states(self, given: Sequence[int] | Tensor, segments: Sequence[int] | None) -> Tensor:
        """Token states of one sequence, given as ids or as embeddings [tokens, width]: [tokens, hidden], on the CPU.

        `segments` is None for a model without a segment table.
        """
        inputs: dict[str, Tensor] = {}
        if isinstance(given, Tensor):
            inputs["inputs_embeds"] = given.to(self._device, self._dtype)[None]
        else:
            inputs["input_ids"] = torch.tensor([list(given)], device=self._device)
        # every token is attended to: a model that would guess at padding from the ids is told so
        inputs["attention_mask"] = torch.ones(1, len(given), dtype=torch.long, device=self._device)
        if segments is not None:
            inputs["token_type_ids"] = torch.tensor([list(segments)], device=self._device)
        with torch.inference_mode():
            output = self.model(**inputs)
            if self._mix is None:
                return output.last_hidden_state[0].cpu()
            return self._mix({"all_layer_embeddings": output.hidden_states})["token_embeddings"][0].cpu()

    def padded(self, ids: Sequence[Sequence[int]], size: int) -> Callable[[], None]:
        """Return a run over padded batches of `size` sequences, sorted by length; inputs are moved beforehand."""
        from torch.nn.utils.rnn import pad_sequence

        tensors = [torch.tensor(sequence) for sequence in sorted(ids, key=len, reverse=True)]
        batches: list[dict[str, Tensor]] = []
        for start in range(0, len(tensors), size):
            members = tensors[start : start + size]
            mask = pad_sequence([torch.ones_like(member) for member in members], batch_first=True)
            padded = pad_sequence(members, batch_first=True)
            batches.append({"input_ids": padded.to(self._device), "attention_mask": mask.to(self._device)})

        def run() -> None:
            with torch.inference_mode():
                for batch in batches:
                    self.model(**batch)

        return run


class CausalReference:
    """transformers' causal language model in one dtype, with its plain eager attention, one sequence at a time."""

    def __init__(self, root: Path, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
        with quiet():
            self._model: Any = AutoModelForCausalLM.from_pretrained(
                str(root), dtype=dtype, **implementations("eager"), **options
            )
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(root), **options)
        self._model.to(device).eval()
        self._device, self._dtype = device, dtype

    def table(self, ids: Sequence[int]) -> Tensor:
        """The model's own embedding of token ids: [tokens, width]."""
        with torch.inference_mode():
            return self._model.get_input_embeddings()(torch.tensor(ids, device=self._device))

    def ids(self, text: str) -> list[int]:
        """A text's token ids."""
        return self._tokenizer(text)["input_ids"]

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int] | None:
        """A conversation's token ids, the beginning of the answer included; None without a chat template."""
        if not self._tokenizer.chat_template:
            return None
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
        return self._tokenizer.apply_chat_template(list(messages), **options)["input_ids"]

    def logits(self, given: Sequence[int] | Tensor) -> Tensor:
        """The logits behind each token of a sequence of ids or embeddings: [tokens, vocabulary], on the CPU."""
        with torch.inference_mode():
            return self._model(**self._inputs(given), use_cache=False).logits[0].cpu()

    def greedy(self, given: Sequence[int] | Tensor, count: int) -> tuple[list[int], list[float]]:
        """`generate` without sampling and without end: `count` tokens, and how far each is ahead of the next likely."""
        plain = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "repetition_penalty": 1.0}
        with torch.inference_mode():
            output = self._model.generate(
                **self._inputs(given),
                max_new_tokens=count,
                output_logits=True,
                return_dict_in_generate=True,
                **plain,
            )
        best = [step[0].double().topk(2).values for step in output.logits]
        return output.sequences[0, -count:].tolist(), [float(two[0] - two[1]) for two in best]

    def _inputs(self, given: Sequence[int] | Tensor) -> dict[str, Tensor]:
        mask = torch.ones(1, len(given), dtype=torch.long, device=self._device)
        if isinstance(given, Tensor):
            return {"inputs_embeds": given.to(self._device, self._dtype)[None], "attention_mask": mask}
        return {"input_ids": torch.tensor([list(given)], device=self._device), "attention_mask": mask}


def _need_sentence_transformers() -> None:
    if find_spec("sentence_transformers") is None:
        raise MissingDependencyError(
            "parity needs sentence-transformers: pip install 'dualgraph-toolkit[reference]', or pass --no-verify"
        )


def _layer_mix(root: Path, folder: str) -> Any:
    """The WeightedLayerPooling in a folder of the checkpoint, as sentence-transformers loads it."""
    _need_sentence_transformers()
    from sentence_transformers.sentence_transformer.modules import WeightedLayerPooling

    return WeightedLayerPooling.load(str(root), subfolder=folder, local_files_only=True).eval()


def _with_attention(attention: str, make: Callable[[str], Any]) -> Any:
    """Make a model with this attention; with its plain one where transformers has no other for the architecture."""
    try:
        return make(attention)
    except ValueError:
        return make("eager")


def _tokens(features: Mapping[str, Tensor]) -> list[tuple[int, int]]:
    """(token id, segment id) of each token of a batch of one."""
    ids = features["input_ids"][0]
    types = features.get("token_type_ids")
    segments = types[0] if types is not None else torch.zeros_like(ids)
    return list(zip(ids.tolist(), segments.tolist(), strict=True))


class _SentenceTransformersModel:
    """A model of sentence-transformers, of the class `kind`, on the source checkpoint, in one dtype."""

    kind: str

    def __init__(self, root: Path, dtype: torch.dtype, device: torch.device, attention: str = "eager") -> None:
        _need_sentence_transformers()
        import sentence_transformers

        if not hasattr(sentence_transformers, self.kind):
            raise MissingDependencyError(
                f"parity needs sentence-transformers 6.0 or newer, for its {self.kind}: "
                "pip install -U sentence-transformers, or pass --no-verify"
            )

        def make(name: str) -> Any:
            return getattr(sentence_transformers, self.kind)(
                str(root),
                device=str(device),
                model_kwargs={"dtype": dtype, **implementations(name)},
                trust_remote_code=False,
                local_files_only=True,
            )

        with quiet():
            self._model: Any = self._make(attention, make)

    def _make(self, attention: str, make: Callable[[str], Any]) -> Any:
        return make(attention)

    def limit_length(self, limit: int) -> None:
        """Use our length limit, where the checkpoint's exceeds what the model can take."""
        self._model.max_seq_length = limit

    def tokens(self, item: Any, prompt: str) -> list[tuple[int, int]]:
        """(token id, segment id) of each token that it feeds; segments are zeros if there are none."""
        features = self._model.preprocess([item], prompt=prompt)
        if features["input_ids"].shape[0] != 1:
            raise ParityError("sentence-transformers flattened a batch of one text: cannot compare token ids")
        return _tokens(features)


class SentenceTransformersReference(_SentenceTransformersModel):
    """`SentenceTransformer`, one text at a time; `normalize` scales its vectors to length 1 in the end."""

    kind = "SentenceTransformer"

    def __init__(
        self,
        root: Path,
        dtype: torch.dtype,
        device: torch.device,
        attention: str = "eager",
        *,
        normalize: bool = False,
    ) -> None:
        super().__init__(root, dtype, device, attention)
        self._normalize = normalize

    def result(self, item: str, prompt: str) -> Tensor:
        """`encode` of one text: [dim], on the CPU."""
        options = {"convert_to_tensor": True, "show_progress_bar": False, "normalize_embeddings": self._normalize}
        return self._model.encode([item], prompt=prompt, **options)[0].cpu()

    def vectors(self, texts: list[str], batch_size: int) -> Tensor:
        """`encode` of many texts: float32 [texts, dim], on the CPU."""
        return self._model.encode(texts, batch_size=batch_size, convert_to_tensor=True).float().cpu()

    def require_unpadded(self) -> None:
        """Make sure that texts are packed without padding.

        Raises:
            UnsupportedError: the library does not do that with this model and attention.
        """
        if not self._model[0].can_flatten_inputs:
            raise UnsupportedError("sentence-transformers does not pack this model's inputs")


class SparseEncoderReference(_SentenceTransformersModel):
    """`SparseEncoder`, one text at a time."""

    kind = "SparseEncoder"

    def result(self, item: str, prompt: str) -> Tensor:
        """`encode` of one text, dense: [words], on the CPU."""
        options = {"convert_to_tensor": True, "convert_to_sparse_tensor": False, "show_progress_bar": False}
        return self._model.encode([item], prompt=prompt, **options)[0].cpu()


class Sided(NamedTuple):
    """A text as a query or a document; `own` says that the reference is to find the kind's prompt by itself."""

    kind: Kind
    text: str
    own: bool


class MultiVectorReference(_SentenceTransformersModel):
    """`MultiVectorEncoder`, one text at a time."""

    kind = "MultiVectorEncoder"

    def limit_length(self, limit: int) -> None:
        """Use our length limit, where one of the checkpoint's exceeds what the model can take."""
        transformer = self._model[0]
        for name in ("max_seq_length", "query_length", "document_length"):
            if (getattr(transformer, name) or 0) > limit:
                setattr(transformer, name, limit)

    def tokens(self, item: Sided, prompt: str) -> list[tuple[int, int]]:
        """(token id, segment id) of each token that is attended to or scored; segments are zeros if there are none."""
        used = self._model.prompts.get(item.kind) if item.own else prompt
        features = self._model.preprocess([item.text], prompt=used, task=item.kind)
        if not any(type(module).__name__ == "MultiVectorMask" for module in self._model):
            attended = features["attention_mask"][0].bool()
            names = [name for name in ("input_ids", "token_type_ids") if name in features]
            features = {name: features[name][:, attended] for name in names}
        return _tokens(features)

    def result(self, item: Sided, prompt: str) -> Tensor:
        """`encode_query` or `encode_document` of one text: [kept tokens, dim], on the CPU."""
        encode = {"query": self._model.encode_query, "document": self._model.encode_document}[item.kind]
        return encode([item.text], prompt=None if item.own else prompt, show_progress_bar=False)[0].cpu()


class CrossEncoderReference(_SentenceTransformersModel):
    """`CrossEncoder`, one pair at a time."""

    kind = "CrossEncoder"

    def _make(self, attention: str, make: Callable[[str], Any]) -> Any:
        return _with_attention(attention, make)

    def result(self, item: Any, prompt: str) -> Tensor:
        """Raw logits of one pair, then what `predict` makes of them: [2 × labels], on the CPU."""
        raw, final = (
            self._model.predict([item], prompt=prompt, activation_fn=f, convert_to_tensor=True, show_progress_bar=False)
            for f in (torch.nn.Identity(), None)
        )
        return torch.cat((raw.view(-1), final.view(-1))).cpu()

    def scores(self, pairs: list[Any], batch_size: int) -> Tensor:
        """`predict` of many pairs: float32 [pairs], on the CPU."""
        options = {"convert_to_tensor": True, "show_progress_bar": False}
        return self._model.predict(pairs, batch_size=batch_size, **options).float().cpu()


class ClassifierReference:
    """transformers' sequence or token classifier on the source checkpoint, in one dtype, one text at a time."""

    def __init__(
        self, root: Path, dtype: torch.dtype, device: torch.device, attention: str = "eager", *, per_token: bool
    ) -> None:
        from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

        maker = AutoModelForTokenClassification if per_token else AutoModelForSequenceClassification
        options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
        with quiet():
            self._model: Any = _with_attention(
                attention,
                lambda name: maker.from_pretrained(str(root), dtype=dtype, **implementations(name), **options),
            )
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(root), **options)
        self._model.to(device).eval()
        self._device = device
        self._limit: int | None = None

    def limit_length(self, limit: int) -> None:
        """Use our length limit."""
        self._limit = limit

    def tokens(self, item: Any, prompt: str) -> list[tuple[int, int]]:
        """(token id, segment id) of each token; segments are zeros if the tokenizer emits none."""
        return _tokens(self._features(item))

    def result(self, item: Any, prompt: str) -> Tensor:
        """Logits of one text or pair: [labels] or [tokens, labels], on the CPU."""
        features = {name: tensor.to(self._device) for name, tensor in self._features(item).items()}
        with torch.inference_mode():
            return self._model(**features).logits[0].cpu()

    def _features(self, item: Any) -> dict[str, Tensor]:
        cut: dict[str, Any] = {"truncation": True, "max_length": self._limit, "padding": False}
        # as a batch of one: only so is an empty second text still the second of a pair
        texts = [[text] for text in ((item,) if isinstance(item, str) else item)]
        return dict(self._tokenizer(*texts, return_tensors="pt", **cut))
