"""Draw the plot and write the table of the README from the saved results. Nothing is measured here.

python benchmarks/report.py
"""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"
README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- benchmarks: written by benchmarks/report.py -->", "<!-- end of benchmarks -->"
SUITE = "encoders-h200.json"
MACHINES = {"minilm-cpu.json": "CPU", "minilm-h200.json": "H200"}


def load(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def best(result: dict[str, Any], what: str, who: str) -> dict[str, Any] | None:
    """The peer's best figure of a kind, or ours."""
    found = [m for m in result["measurements"] if m["what"].startswith(what) and m["who"] == who]
    if who == "toolkit":
        return found[0] if found else None
    return min(found, key=lambda m: m["ratio"]) if found else None


def label(result: dict[str, Any], who: str) -> str:
    """A peer's name; transformers' with the attention that it ran (files without the field: its eager one)."""
    return f"transformers, {result.get('peer_attention', 'eager')} attention" if who == "transformers" else who


def rows(result: dict[str, Any], machine: str) -> list[str]:
    kinds = ("strings to vectors", "model only", "one text of", "model only, one text of")
    lines: list[str] = []
    for what in dict.fromkeys(m["what"] for m in result["measurements"] if m["what"].startswith(kinds)):
        ours = best(result, what, "toolkit")
        assert ours is not None
        for who in ("sentence-transformers", "onnxruntime", "transformers"):
            peer = best(result, what, who)
            if peer is not None:
                theirs = (
                    f"{peer['value']:,.0f} {peer['unit']} ({peer['setting']})"
                    if peer["setting"]
                    else f"{peer['value']:,.0f} {peer['unit']}"
                )
                lines.append(
                    f"| {machine} | {what} | {ours['value']:,.0f} {ours['unit']} | {label(result, who)} | {theirs} | "
                    f"**{peer['ratio']:.2f} ×** |"
                )
    return lines


def suite_lines() -> list[str]:
    """Each model of the suite beside sentence-transformers' best batch, padded and unpadded."""
    result = load(SUITE)
    lines = [
        "| model, parameters | toolkit | padded, SDPA | | unpadded, flash attention | |",
        "|---|---|---|---|---|---|",
    ]
    for run in result["runs"]:
        ours, *peers = run["measurements"]
        cells = [f"{run['model']}, {run['parameters'] / 1e6:.0f} M", f"{ours['value']:,.0f}"]
        for kind in ("padded", "unpadded"):
            found = [m for m in peers if m["setting"].startswith(kind)]
            best_of = min(found, key=lambda m: m["ratio"]) if found else None
            cells.append(f"{best_of['value']:,.0f} ({best_of['setting'].split(', ', 1)[1]})" if best_of else "—")
            cells.append(f"**{best_of['ratio']:.2f} ×**" if best_of else "—")
        lines.append("| " + " | ".join(cells) + " |")
    texts = {run["task"]: run["texts"] for run in result["runs"]}
    versions = ", ".join(f"{k} {result['versions'][k]}" for k in ("torch", "transformers", "sentence-transformers"))
    note = (
        "Tokens per second, strings to vectors (rerankers: pairs of strings to scores), beside sentence-transformers "
        f"at its best batch size. {result['hardware']}, {result['dtype']}, {versions}; random weights; "
        + "; ".join(f"{task}: {t['count']} inputs, {t['tokens']:,} tokens" for task, t in texts.items())
        + ". sentence-transformers packs no rerankers."
    )
    return [note, "", *lines]


def block() -> str:
    """The README's section, from the files alone."""
    lines = ["| | figure | toolkit | peer, at its best | | ratio |", "|---|---|---|---|---|---|"]
    notes: list[str] = []
    for name, machine in MACHINES.items():
        result = load(name)
        lines += rows(result, machine)
        versions = ", ".join(f"{k} {result['versions'][k]}" for k in ("torch", "transformers", "sentence-transformers"))
        texts = result["texts"]
        notes.append(
            f"{machine}: {result['hardware']}, {result['dtype']}, mode {result['mode']}, {versions}; "
            f"{texts['count']} texts, {texts['tokens']:,} tokens."
        )
    return "\n".join([BEGIN, *lines, "", *notes, "", *suite_lines(), END])


def draw() -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "toolkit"
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.2))
    for axis, (name, machine) in zip(axes, MACHINES.items(), strict=True):
        result = load(name)
        kind = "strings to vectors" if machine == "CPU" else "model only, 65536"
        bars: dict[str, float] = {}
        for m in result["measurements"]:
            if m["what"].startswith(kind) and "copied" not in m["setting"]:
                who = label(result, m["who"])
                bars[who] = max(bars.get(who, 0), m["value"])
        names = sorted(bars, key=lambda who: bars[who])
        colours = ["#2a6f97" if who == "toolkit" else "#b8c4cc" for who in names]
        drawn = axis.barh(names, [bars[who] for who in names], color=colours)
        axis.bar_label(drawn, [f"{bars[who]:,.0f}" for who in names], padding=4, fontsize=9)
        axis.set_xlim(0, max(bars.values()) * 1.25)
        axis.set_title(
            f"{machine} · {'strings to vectors' if machine == 'CPU' else 'model only, 65,536 tokens'}", fontsize=10
        )
        axis.set_xlabel("tokens per second")
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.set_major_locator(MaxNLocator(4))
        axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g} M" if value >= 1e6 else f"{value:,.0f}")
    figure.suptitle("all-MiniLM-L6-v2", fontsize=11)
    figure.tight_layout()
    figure.savefig(FOLDER / "minilm.svg", metadata={"Date": None})


def main() -> None:
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    README.write_text(before + block() + rest.split(END)[1], encoding="utf-8")
    draw()


if __name__ == "__main__":
    main()
