"""`toolkit generate`: see `toolkit.cli`."""

import json
from typing import Annotated, Any

import typer

from toolkit.console import AsJson, Device, Mode, OutFolder, TextFile, print_json, run_on
from toolkit.errors import InputError
from toolkit.lines import read_lines

__all__ = ["generate"]


def generate(
    out: OutFolder,
    file: TextFile = "-",
    chat: Annotated[
        bool, typer.Option("--chat", help="Each line is a user's message: use the checkpoint's chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: the system message in front.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="At most so many tokens for each line.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; above, tokens are drawn.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw among so many tokens; 0 for all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw among the likeliest tokens of this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Draw among tokens with this share of the likeliest's.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1, what was said is said less again.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Of the random numbers.", show_default=False)] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends the answer; may be repeated.")] = None,
    device: Device = "auto",
    mode: Mode = "auto",
    as_json: AsJson = False,
) -> None:
    """Continue prompts, one a line. One prompt is shown as it grows, several one after another."""
    prompts = read_lines(file)
    if system is not None and not chat:
        raise InputError("--system is for --chat")
    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": tuple(stop or ()),
    }

    def work(runner: Any) -> list[Any]:
        if runner.artifact.manifest.task != "generate":
            return runner.generate(prompts, max_new_tokens)  # which says what it is for
        first = [{"role": "system", "content": system}] if system is not None else []
        inputs = [
            runner.chat_prompt([*first, {"role": "user", "content": prompt}]) if chat else prompt for prompt in prompts
        ]
        if as_json or len(inputs) != 1:
            return runner.generate(inputs, **settings)
        for chunk in runner.stream(inputs, **settings):
            print(chunk.text, end="", flush=True)
        print()
        return []

    results = run_on(out, device, mode, f"continuing {len(prompts)} prompts", work, prints=True)
    if as_json:
        print_json({"prompts": prompts, "results": [result.to_dict() for result in results]})
    else:
        for result in results:
            print(json.dumps(result.text, ensure_ascii=False))
