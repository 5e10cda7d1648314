"""Greedy decoding of a converted decoder beside transformers' `generate`, in one run.

python benchmarks/decoders.py OUT [FILE]

OUT is a converted folder of task `generate` whose source is still there. transformers runs with its dynamic cache,
eager, and with its static cache, compiled; the ratio is to the faster. FILE gets the figures as JSON.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import toolkit
from toolkit.bench.measure import hardware
from toolkit.parity.harness import find_source
from toolkit.versions import library_versions

PROMPT_TOKENS, NEW_TOKENS, ROUNDS = 32, 128, 3


def best_rate(run: Callable[[], Any], tokens: int) -> float:
    """Tokens per second of the best of some rounds, after one that compiles."""
    run()
    seconds: list[float] = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return tokens / min(seconds)


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    from transformers import AutoModelForCausalLM

    runner = toolkit.load(sys.argv[1])
    ids = [(7919 * k) % 1000 + 10 for k in range(PROMPT_TOKENS)]
    found = {
        f"toolkit, {n} at once": best_rate(
            lambda n=n: runner.generate([toolkit.TokenIds(ids)] * n, NEW_TOKENS, ignore_eos=True), n * NEW_TOKENS
        )
        for n in (1, 4)
    }
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(find_source(runner.artifact, None)), dtype=runner.artifact.dtype
    ).to(runner.device)
    given = torch.tensor([ids], device=runner.device)
    plain = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain["attention_mask"] = torch.ones_like(given)
    for name, more in (("dynamic cache, eager", {}), ("static cache, compiled", {"cache_implementation": "static"})):
        rate = best_rate(lambda more=more: model.generate(given, **plain, **more), NEW_TOKENS)
        found[f"transformers, {name}"] = rate
    peer = max(rate for name, rate in found.items() if name.startswith("transformers"))
    for name, rate in found.items():
        print(f"{name:40} {rate:8.1f} tokens/s")
    ratio = found["toolkit, 1 at once"] / peer
    print(f"one sequence: {ratio:.2f} × transformers' best")
    if len(sys.argv) == 3:
        result = {
            "model": Path(sys.argv[1]).name,
            "mode": runner.mode,
            "dtype": runner.artifact.manifest.dtype,
            "prompt_tokens": PROMPT_TOKENS,
            "new_tokens": NEW_TOKENS,
            "tokens_per_second": found,
            "ratio": ratio,
            "hardware": hardware(runner.device),
            "versions": library_versions(),
        }
        Path(sys.argv[2]).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
