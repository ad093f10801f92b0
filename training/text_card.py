"""Write the model card of the starter text models from what was measured: log, gate, hashes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from masters import checksums

GATE = (
    ("verbatim", "evidence lines that are verbatim spans of six words or more", "0.80"),
    ("overlap", "evidence lines that overlap the gold sentence", "0.50"),
    ("ended", "outputs ended by the end token within 160 tokens", "0.90"),
    ("repeat_128", "accuracy on the second half of 2 x 128 random tokens", "0.98"),
    ("repeat_400", "the same, 2 x 400", ""),
    ("answer", "answers that match a gold answer", ""),
    ("label", "quotes that stand in the passage they name", ""),
    ("retrieved", "prompts that hold the gold sentence", ""),
    ("draft_agreement", "target tokens that the draft guesses", ""),
)


def read_log(path: Path) -> dict[str, Any]:
    """Sum up a training log: steps, tokens, hours, the mean loss of the last 50 steps."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    last = lines[-50:]
    return {
        "steps": lines[-1]["step"],
        "tokens": lines[-1]["tokens"],
        "hours": round(sum(line["seconds"] for line in lines) / 3600, 2),
        "loss": round(sum(line["loss"] for line in last) / len(last), 3),
    }


def gate_table(runs: list[dict[str, Any]]) -> str:
    """Return a table of the rates of several gate runs and their required values."""
    counts = [run["passages"] for run in runs]
    titles = ("records, 1 to 4 passages" if n is None else f"{n} retrieved" for n in counts)
    heads = " | ".join(titles)
    rows = [f"| measured | asked | {heads} |", "| --- | --- |" + " --- |" * len(runs)]
    for key, text, least in GATE:
        cells = " | ".join(f"{run[key]:.3f}" for run in runs if key in run)
        rows.append(f"| {text} | {least} | {cells} |")
    return "\n".join(rows)


def main() -> None:
    """Fill `training/text_card.md` and write it beside the models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/text"))
    parser.add_argument("--gate", type=Path, nargs="+", help="JSON files printed by text_gate.py")
    parser.add_argument("--starter", type=Path, default=Path("ragspec/starter"))
    args = parser.parse_args()
    fields: dict[str, Any] = {
        "gate": gate_table([json.loads(path.read_text()) for path in args.gate])
    }
    hashes = []
    for name in ("target", "draft"):
        for key, value in read_log(args.runs / name / "log.jsonl").items():
            fields[f"{name}_{key}"] = f"{value:,}" if isinstance(value, int) else value
        hashes += [f"{sha}  {name}/{file}" for file, sha in checksums(args.starter / name).items()]
    fields["hashes"] = "\n".join(hashes)
    card = Path(__file__).with_suffix(".md").read_text().format(**fields)
    (args.starter / "README.md").write_text(card)


if __name__ == "__main__":
    main()
