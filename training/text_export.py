"""Write a checkpoint as a plain Hugging Face folder: config, bf16 safetensors, tokenizer."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from masters import checksums, readable
from text_model import SHAPES, build_model


def load_checkpoint(name: str, checkpoint: Path) -> tuple[Any, dict[str, int]]:
    """Build the model `name` with a checkpoint's weights in bfloat16; also give its counters."""
    state = torch.load(checkpoint, weights_only=True, map_location="cpu")
    model = build_model(name)
    missing = model.load_state_dict(state["masters"], strict=False)
    if [key for key in missing.missing_keys if key != "lm_head.weight"] or missing.unexpected_keys:
        raise ValueError(f"{checkpoint} does not fit the model {name!r}: {missing}")
    model.tie_weights()
    model.generation_config.do_sample = False
    return model.to(torch.bfloat16).eval(), {k: state[k] for k in ("step", "tokens")}


def export(name: str, checkpoint: Path, tokenizer: Path, out: Path) -> dict[str, int]:
    """Write model and tokenizer to `out` in shards below 14 MB; returns the counters."""
    from transformers import AutoTokenizer

    model, counters = load_checkpoint(name, checkpoint)
    for old in out.glob("model*.safetensors*"):
        old.unlink()
    model.save_pretrained(out, max_shard_size="14MB")
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(out)
    written = out / "tokenizer.json"  # without the layout for readers it is less than half as large
    known = json.loads(written.read_text(encoding="utf-8"))
    text = json.dumps(known, ensure_ascii=False, separators=(",", ":"))
    written.write_text(text, encoding="utf-8")
    readable(out)
    return counters


def main() -> None:
    """Export one of the two models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(SHAPES), default="target")
    parser.add_argument("--checkpoint", type=Path, default=None)
    parser.add_argument("--tokenizer", type=Path, default=Path("runs/text/tokenizer"))
    parser.add_argument("--out", type=Path, default=None, help="default: ragspec/starter/MODEL")
    args = parser.parse_args()
    checkpoint = args.checkpoint or Path("runs/text") / args.model / "last.pt"
    out = args.out or Path("ragspec/starter") / args.model
    counters = export(args.model, checkpoint, args.tokenizer, out)
    print(out, counters)
    for name, digest in checksums(out).items():
        print(digest, name)


if __name__ == "__main__":
    main()
