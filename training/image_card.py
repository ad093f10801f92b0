"""Write the model card of the starter image models from what was measured: logs, sheets, hashes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from image_data import HELD_OUT, SETS, read_pictures, split
from image_model import SHAPES
from image_tokenizer import WARM_UP, codes_in_use, psnr
from image_train import BATCH
from masters import checksums

from ragspec.visual.models.vq import VQTokenizer

COLUMNS = (
    ("set", "set"),
    ("guidance", "guidance"),
    ("temperature", "temperature"),
    ("target_entropy", "entropy of the target"),
    ("draft_entropy", "entropy of the draft"),
    ("overlap", "overlap"),
    ("first_choice", "first choice"),
)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


def parameters(folder: Path) -> str:
    """Count the numbers in the safetensors of a folder."""
    from safetensors.torch import load_file

    tensors = [t for path in folder.glob("*.safetensors") for t in load_file(path).values()]
    return f"{sum(tensor.numel() for tensor in tensors):,}"


def set_figures(kind: str, log: list[dict[str, Any]], starter: Path) -> dict[str, Any]:
    """Sum up a set's part of the training log."""
    lines = [line for line in log if line["set"] == kind]
    last = lines[-50:]
    measured = [line for line in lines if "held_target" in line][-1]
    fields: dict[str, Any] = {f"{kind}_steps": f"{lines[-1]['step']:,}"}
    for name in SHAPES:
        fields[f"{kind}_{name}"] = round(sum(line[name] for line in last) / len(last), 2)
        fields[f"{kind}_held_{name}"] = round(measured[f"held_{name}"], 2)
        fields[f"{kind}_{name}_parameters"] = parameters(starter / kind / name)
    return fields


def tokenizer_figures(starter: Path, shared: Path, log: list[dict[str, Any]]) -> dict[str, Any]:
    """Measure the exported tokenizer."""
    tokenizer = VQTokenizer.from_pretrained(starter / "tokenizer")
    sets = [read_pictures(shared, kind) for kind in SETS]
    fields: dict[str, Any] = {
        f"psnr_{pictures.kind}": f"{psnr(tokenizer, split(pictures)[1]):.1f}" for pictures in sets
    }
    fields["used"] = f"{codes_in_use(tokenizer, sets):,}"
    fields["tokenizer_parameters"] = parameters(starter / "tokenizer")
    fields["tokenizer_steps"] = f"{log[-1]['step'] + 1:,}"
    fields["tokenizer_hours"] = hours(log)
    return fields


def hours(log: list[dict[str, Any]]) -> str:
    """Sum the seconds of a log's steps."""
    return f"{sum(line['seconds'] for line in log) / 3600:.2f}"


def sample_table(runs: list[dict[str, Any]]) -> str:
    """Lay out what the sheets measured."""
    rows = [" | ".join(title for _, title in COLUMNS), " | ".join("---" for _ in COLUMNS)]
    rows += [" | ".join(str(run[key]) for key, _ in COLUMNS) for run in runs]
    return "\n".join(f"| {row} |" for row in rows)


def main() -> None:
    """Fill `training/image_card.md` and write it beside the models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/images"))
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--samples", type=Path, help="JSON lines printed by image_sheet.py")
    parser.add_argument("--best", default="", help="a sentence on the settings that look best")
    parser.add_argument("--starter", type=Path, default=Path("ragspec/starter/images"))
    parser.add_argument("--muon-rate", default="6e-3")
    parser.add_argument("--adam-rate", default="4e-3")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    log = read_lines(args.runs / "models" / "log.jsonl")
    fields: dict[str, Any] = {"batch": BATCH, "held": HELD_OUT, "warm_up": WARM_UP}
    fields |= {"hours": hours(log), "seed": args.seed, "best": args.best}
    fields |= {"muon_rate": args.muon_rate, "adam_rate": args.adam_rate}
    for kind in SETS:
        fields |= set_figures(kind, log, args.starter)
    tokenizer_log = read_lines(args.runs / "tokenizer" / "log.jsonl")
    fields |= tokenizer_figures(args.starter, args.shared, tokenizer_log)
    fields["samples"] = sample_table(read_lines(args.samples))
    fields["hashes"] = "\n".join(
        f"{sha}  {file}"
        for file, sha in checksums(args.starter).items()
        if Path(file).parent.name in ("tokenizer", *SHAPES)
    )
    card = Path(__file__).with_suffix(".md").read_text().format(**fields)
    (args.starter / "README.md").write_text(card)


if __name__ == "__main__":
    main()
