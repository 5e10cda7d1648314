"""Greedy decoding beside transformers' `generate`, in one run.

python benchmarks/decoders.py OUT [FILE]
python benchmarks/decoders.py qwen3-0.6b [FILE]

OUT is a converted folder of task `generate` whose source is still there; the name of a shape stands for a model of
that shape with random weights, which speed does not depend on. transformers runs with its dynamic cache, eager, and
with its static cache, compiled; the ratio is to the faster. FILE gets the figures as JSON.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import toolkit
from toolkit.bench.measure import hardware
from toolkit.bench.models import Shape, write_checkpoint
from toolkit.parity.harness import find_source
from toolkit.versions import library_versions

NEW_TOKENS, ROUNDS = 128, 3
SHAPES = {
    "qwen3-0.6b": Shape(
        name="qwen3-0.6b",
        model="Qwen3ForCausalLM",
        task="generate",
        config={
            "vocab_size": 151_936,
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
            "max_position_embeddings": 40_960,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
        },
    )
}
# A Hopper card's dense bfloat16 matrix products, as measured on one, for shares of what is possible.
FLOPS = {"NVIDIA H200": 790e12}


def best_seconds(run: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """The best of some rounds, after one that compiles."""
    run()
    seconds: list[float] = []
    for _ in range(rounds):
        wait()
        begin = time.perf_counter()
        run()
        wait()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def prompt(length: int, number: int = 0) -> list[int]:
    return [(7919 * k + 31 * number) % 1000 + 10 for k in range(length)]


def decoding(runner: Any, model: Any, sizes: tuple[int, ...], length: int) -> Mapping[str, Mapping[str, float]]:
    """Tokens per second, prompts of `length` tokens included, by the number of sequences."""
    found: dict[str, dict[str, float]] = {}
    for size in sizes:
        prompts = [toolkit.TokenIds(prompt(length, k)) for k in range(size)]
        seconds = best_seconds(lambda prompts=prompts: runner.generate(prompts, NEW_TOKENS, ignore_eos=True))
        rates = {"toolkit": size * NEW_TOKENS / seconds}
        given = torch.tensor([prompt(length, k) for k in range(size)], device=runner.device)
        plain = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        plain["attention_mask"] = torch.ones_like(given)
        static = {"cache_implementation": "static"}
        ways = {"transformers, dynamic cache, eager": {}, "transformers, static cache, compiled": static}
        for name, more in ways.items():
            seconds = best_seconds(lambda more=more, given=given, plain=plain: model.generate(given, **plain, **more))
            rates[name] = size * NEW_TOKENS / seconds
        rates["ratio"] = rates["toolkit"] / max(rate for name, rate in rates.items() if name != "toolkit")
        found[f"{size} at once"] = rates
        print(f"{size} at once", {name: round(rate, 2) for name, rate in rates.items()}, flush=True)
    return found


def embeddings(runner: Any, sizes: tuple[int, ...], length: int) -> Mapping[str, Mapping[str, float]]:
    """Ids-only traffic before and after the embeds path was first used, and prompts of `length` tokens on both paths.

    Prefix caching would spare the second round its prompts, so every round has prompts of its own.
    """
    found: dict[str, dict[str, float]] = {}
    serial = iter(range(10**9))

    def rate(size: int, embeds: bool) -> float:
        best = float("inf")
        for _ in range(ROUNDS + 1):
            rows = [prompt(length, 17 * next(serial)) for _ in range(size)]
            given = [
                toolkit.PromptEmbeds(runner.embed_tokens(row)) if embeds else toolkit.TokenIds(row) for row in rows
            ]
            wait()
            begin = time.perf_counter()
            runner.generate(given, NEW_TOKENS, ignore_eos=True)
            best = min(best, time.perf_counter() - begin)
        return size * NEW_TOKENS / best

    before = {size: rate(size, False) for size in sizes}
    embeds = {size: rate(size, True) for size in sizes}
    for size in sizes:
        after = rate(size, False)
        rates = {"ids, embeds never used": before[size], "ids, embeds used": after, "embeds": embeds[size]}
        rates |= {"used / never used": after / before[size], "embeds / ids": embeds[size] / after}
        found[f"{size} at once"] = rates
        print(f"prompts of {length}, {size} at once", {k: round(rate, 3) for k, rate in rates.items()}, flush=True)
    return found


def prefill(runner: Any, model: Any, length: int) -> Mapping[str, float]:
    """Seconds from a prompt to its first token, and the share of the card's matrix products."""
    serial = iter(range(10**9))
    ours = best_seconds(lambda: runner.generate(toolkit.TokenIds(prompt(length, next(serial))), 1, ignore_eos=True))
    given = torch.tensor([prompt(length)], device=runner.device)
    with torch.inference_mode():
        theirs = best_seconds(lambda: model(given, logits_to_keep=1).logits.argmax(-1).tolist())
    spec = runner.artifact.manifest.spec
    weights = sum(p.numel() for name, p in model.named_parameters() if "layers." in name)
    scores = sum(2 * a.heads * a.head_dim * length * length for a in spec.attentions)  # half of them, for q k and p v
    found = {"toolkit": ours, "transformers, eager": theirs, "ratio": theirs / ours}
    peak = FLOPS.get(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    if peak is not None:
        found["share of the roofline"] = (2 * weights * length + scores) / peak / ours
    print(f"prompt of {length}", {k: round(v, 4) for k, v in found.items()}, flush=True)
    return found


def measure(out: str, save: Callable[[dict[str, Any]], None]) -> None:
    """Measure an artifact; `save` gets what is known so far, several times."""
    from transformers import AutoModelForCausalLM

    begin = time.perf_counter()
    runner: Any = toolkit.load(out)
    runner.generate(toolkit.TokenIds(prompt(8)), 1, ignore_eos=True)
    first = time.perf_counter() - begin
    print(f"from load to the first token {first:.1f} s", flush=True)
    source = str(find_source(runner.artifact, None))
    cuda = runner.device.type == "cuda"
    result: dict[str, Any] = {"hardware": hardware(runner.device), "versions": library_versions()}
    result |= {"mode": runner.mode, "dtype": runner.artifact.manifest.dtype, "new_tokens": NEW_TOKENS}
    result["seconds_to_first_token"] = first
    if cuda:
        result["embeds"] = embeddings(runner, (1, 32, 256), 512)
        save(result)
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=runner.artifact.dtype).to(runner.device)
    if cuda:
        result["prefill_seconds"] = prefill(runner, model, 4096)
    result["tokens_per_second"] = decoding(runner, model, (1, 32, 256) if cuda else (1, 4), 64 if cuda else 32)
    save(result)


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    name = sys.argv[1]

    def save(result: dict[str, Any]) -> None:
        if len(sys.argv) == 3:
            named = {"model": Path(name).name, **result}
            Path(sys.argv[2]).write_text(json.dumps(named, indent=2) + "\n", encoding="utf-8")

    if name in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            dtype = "bfloat16" if torch.cuda.is_available() else "float32"
            write_checkpoint(SHAPES[name], Path(folder) / "source", getattr(torch, dtype))
            toolkit.convert(str(Path(folder) / "source"), Path(folder) / "out", dtype=dtype, verify=False)
            measure(str(Path(folder) / "out"), save)
    else:
        measure(name, save)


if __name__ == "__main__":
    main()
