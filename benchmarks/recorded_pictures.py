"""The pictures of every image family, rule and drafter, as lines of JSON, to compare two versions.

    python benchmarks/recorded_pictures.py before.jsonl    # before a change
    python benchmarks/recorded_pictures.py after.jsonl     # after it
    diff before.jsonl after.jsonl

The models are the tiny ones of the tests, with random weights, and the bundled sets. They draw on
the CPU with fixed seeds and budgets. Run it with the checkout on PYTHONPATH, for `tests.support`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ragspec.engine.engine import Engine
from ragspec.sampling.settings import Sampling
from ragspec.visual import ImageGPTTarget, ImagePipeline
from tests.support import tiny_images, tiny_latents, tiny_masked, tiny_prompted
from tests.visual.families import test_targets as tiny_targets
from tests.visual.models.test_llamagen_checkpoint import published

CODE_RULES: dict[str, dict[str, Any]] = {
    "exact": {},
    "rejection": {},
    "multi-step": {},
    "without-replacement": {},
    "block": {},
    "lantern": {"delta": 0.4, "neighbours": 9},
    "lantern++": {"lam": 4.0},
    "gsd": {},
}
LATENT_RULES: dict[str, dict[str, Any]] = {
    "near": {"r": 0.3},
    "aligned": {},
    "horizon": {"s": 2},
    "path": {},
}
CALLS: list[dict[str, Any]] = [
    {"guidance_scale": 1.0},
    {"guidance_scale": 3.0, "guidance_interval": (1, 5), "top_k": 12},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02},
    {"num_images_per_prompt": 3},
]
MASKED: dict[str, Any] = {"steps": 6, "device": "cpu", "budget": 4}
PROMPTS = ["a red bicycle", "tree", "a blue cat a blue tree"]
Case = tuple[str, Callable[[], Any]]


def main() -> None:
    """Write the record of every case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, out.open("w", encoding="utf-8") as file:
        folder = Path(name)
        every = chain(
            code_cases(folder), text_cases(folder), prompt_cases(folder), latent_cases(folder)
        )
        for number, (case, draw) in enumerate(chain(every, masked_cases(folder), starter_cases())):
            file.write(json.dumps({"case": f"{number} {case}", **record(draw)}) + "\n")
            file.flush()


def seeded(count: int | None = None) -> Any:
    """Return one generator, or one for each of some images."""
    if count is None:
        return torch.Generator().manual_seed(1)
    return [torch.Generator().manual_seed(seed) for seed in range(count)]


def quiet(pipe: Any) -> Any:
    """Return a pipeline without a progress bar."""
    pipe.set_progress_bar_config(disable=True)
    return pipe


def code_cases(folder: Path) -> Iterator[Case]:
    """Yield the cases of a model of codes by class: rules, drafters, settings of calls."""
    saved = tiny_images.save(folder / "codes")

    def drawn(drafter: Any, rule: str, call: dict[str, Any], **settings: Any) -> Callable[[], Any]:
        def draw() -> Any:
            pipe = ImagePipeline.from_pretrained(saved, drafter, rule, budget=6, **settings)
            request = {"class_labels": ["red", 2], "generator": seeded(), **call}
            return quiet(pipe)(**request)

        return draw

    drafters = ("jacobi", "model", ("jacobi", "model"))
    for (rule, settings), drafter in product(CODE_RULES.items(), drafters):
        yield f"codes {rule} {drafter}", drawn(drafter, rule, {}, **settings)
    yield "codes budgeted", drawn("auto", "lantern", {}, delta=0.5, tv_budget=0.3, neighbours=20)
    yield "codes least gain", drawn("model", "lantern", {}, delta=0.5, least_gain=0.4)
    yield "codes without drafts", drawn(None, "exact", {})
    for mode in ("deterministic", "sampled-without-replacement"):
        yield f"codes {mode}", drawn("model", "lantern", {}, draft_mode=mode)
    for call, drafter in product(CALLS, (None, "jacobi", "model")):
        yield f"codes {call} {drafter}", drawn(drafter, "exact", call)
    many = {"class_labels": [0, 1, 2, 0, 1], "generator": seeded(5)}
    yield "codes in batches", drawn("jacobi", "lantern", many, batch_size=2)
    codes = torch.full((9,), -1)
    codes[[0, 4]] = torch.tensor([5, 7])
    yield "codes continued", drawn("model", "exact", {"codes": codes})


def text_cases(folder: Path) -> Iterator[Case]:
    """Yield the cases of a model of codes by text, and of published files."""
    saved = tiny_images.save(folder / "texts", "features")
    for negative, drafter in product((None, "blue heart", ["a cat", "sun"]), ("jacobi", "model")):
        pipe = quiet(ImagePipeline.from_pretrained(saved, drafter, budget=6))
        request = {"negative_prompt": negative, "generator": seeded(), "guidance_scale": 3.0}
        yield f"texts {negative} {drafter}", partial(pipe, PROMPTS[:2], **request)
    weights = published(tiny_images.model())
    weights["freqs_cis"] = torch.zeros(1 + tiny_images.SIDE**2, 8, 2)
    torch.save({"model": weights}, folder / "c2i.pt")
    opening = {"grid_size": tiny_images.SIDE, "num_attention_heads": 2}
    pipe = ImagePipeline.from_pretrained(
        folder / "c2i.pt",
        "jacobi",
        family="llamagen",
        tokenizer=folder / "texts/tokenizer",
        budget=6,
        **opening,
    )
    yield "published file", lambda: quiet(pipe)(class_labels=[0, 2], generator=seeded())


def prompt_cases(folder: Path) -> Iterator[Case]:
    """Yield the cases of models of transformers."""
    for kind in ("janus", "emu3", "chameleon"):
        saved = tiny_prompted.save(folder / kind, kind)
        if kind == "chameleon":
            tiny_prompted.chameleon_vq().save_pretrained(saved / "vq")
        size = {"height": 6, "width": 8} if kind == "emu3" else {}
        rules = (("exact", {}), ("rejection", {}), ("lantern", {"delta": 0.9, "neighbours": 9}))
        for (rule, settings), drafter in product(rules, (None, "jacobi", "model")):
            pipe = quiet(ImagePipeline.from_pretrained(saved, drafter, rule, budget=6, **settings))
            request = {"generator": seeded(), **size}
            yield f"{kind} {rule} {drafter}", partial(pipe, PROMPTS, **request)
        if kind != "janus":
            beside = {**request, "negative_prompt": "a blue cat", "generator": seeded()}
            yield f"{kind} negative", partial(pipe, PROMPTS, **beside)
    target = ImageGPTTarget(tiny_targets.model("imagegpt"))
    for drafter in (None, "jacobi"):
        sampling = Sampling(temperature=1.0, seed=[3, 4])
        engine = Engine(target, None, drafter, budget=4)
        length = {"max_new_tokens": tiny_targets.COUNT, "ignore_eos": True}
        draw = partial(engine.generate, [target.prompt(0)] * 2, sampling, **length)
        yield f"imagegpt {drafter}", draw


def latent_cases(folder: Path) -> Iterator[Case]:
    """Yield the cases of a causal model of latents."""
    saved = tiny_latents.save(folder / "latents")
    requests = {"class_labels": [0, 1, 2, 0], "generator": seeded(4)}
    for (rule, settings), drafter in product(LATENT_RULES.items(), ("jacobi", "model", None)):
        pipe = quiet(ImagePipeline.from_pretrained(saved, drafter, rule, **settings))
        yield f"latents {rule} {drafter}", lambda pipe=pipe: pipe(**fresh(requests))
    other = quiet(ImagePipeline.from_pretrained(saved, steps=3, floor=0.2, batch_size=3, budget=5))
    for scale in (1.0, 3.0):
        request = {**requests, "guidance_scale": scale}
        yield f"latents scale {scale}", lambda request=request: other(**fresh(request))


def masked_cases(folder: Path) -> Iterator[Case]:
    """Yield the cases of a masked model of latents, plain and with drafts."""
    saved = tiny_masked.save(folder / "masked")
    requests: dict[str, Any] = {"class_labels": [0, 1, 2, 0], "generator": seeded(4)}
    settings: list[dict[str, Any]] = [{"iterations": 4}, {"iterations": 9, "batch_size": 3}]
    settings += [{"iterations": 4, "floor": 0.1}]
    drafts: dict[str, Any] = {"drafter": "jacobi", "floor": 0.1}
    settings += [{**drafts, "rule": rule, **more} for rule, more in LATENT_RULES.items()]
    settings += [{**drafts, "prefill": 0.3, "rule": "near", "r": 9.0}]
    settings += [{**drafts, "batch_size": 3}]
    for setting in settings:
        pipe = quiet(ImagePipeline.from_pretrained(saved, **MASKED | setting))
        yield f"masked {setting}", lambda pipe=pipe: pipe(**fresh(requests))
    for call in ({"guidance_scale": 1.0}, {"temperature": 0.5}):
        request = {**requests, **call}
        yield f"masked {call}", lambda pipe=pipe, request=request: pipe(**fresh(request))
    file = tiny_masked.file(folder / "mar.pth")
    kl = tiny_masked.kl_file(folder / "kl.ckpt")
    opening: dict[str, Any] = {"num_attention_heads": 3, "iterations": 4}
    mar = ImagePipeline.from_pretrained(file, family="mar", tokenizer=kl, **MASKED | opening)
    yield "masked published", lambda: quiet(mar)(**fresh(requests))


def starter_cases() -> Iterator[Case]:
    """Yield the cases of the bundled sets."""
    for rule, drafter in (("exact", "auto"), ("exact", "head"), ("lantern", "auto"), ("gsd", None)):
        pipe = quiet(ImagePipeline.from_pretrained("tiles", drafter, rule))
        request = {"class_labels": ["mon", 6, 3], "generator": seeded()}
        yield f"tiles {rule} {drafter}", partial(pipe, **request)
    emoji = quiet(ImagePipeline.from_pretrained("emoji", "model"))
    yield "emoji", lambda: emoji(["red heart", "sun"], generator=seeded())
    latents = quiet(ImagePipeline.from_pretrained("latent-tiles", rule="near", r=0.02))
    yield "latent-tiles", lambda: latents(class_labels=[24, 3], generator=seeded())
    masked = quiet(ImagePipeline.from_pretrained("masked-tiles", iterations=16, steps=10))
    yield "masked-tiles", lambda: masked(class_labels=["mon", 5], generator=seeded())


def fresh(request: dict[str, Any]) -> dict[str, Any]:
    """Return a request with new generators."""
    return {**request, "generator": seeded(len(request["generator"]))}


def digest(values: Any) -> str:
    """Return a short hash of numbers or pictures."""
    if isinstance(values, list):
        values = np.stack([np.asarray(image) for image in values])
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:12]


def record(draw: Callable[[], Any]) -> dict[str, Any]:
    """Return the facts of one call, or of its error."""
    try:
        out = draw()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    if isinstance(out, list):  # of the engine
        return {
            "codes": digest(np.array([each.tokens for each in out])),
            "label": out[0].label,
            "forwards": sum(each.report.forward_passes for each in out),
        }
    stats, latents = out.stats, getattr(out, "latents", None)
    numbers = out.codes if latents is None else latents
    figures = {name: getattr(stats, name, None) for name in ("tv_excess", "nll_gap")}
    return {
        "codes": digest(numbers.float().numpy()),
        "images": digest(out.images),
        "label": out.label,
        "forwards": stats.forwards,
        "map": digest(out.acceptance_map),
        "seeds": list(stats.seeds),
        "outcomes": digest(np.zeros(0) if latents is None else stats.outcomes),
        "distances": digest(np.zeros(0) if latents is None else stats.distances),
        **{name: None if value is None else round(value, 9) for name, value in figures.items()},
        "codes_per_forward": round(stats.codes_per_forward, 9),
        "repeatable": stats.repeatable,
    }


if __name__ == "__main__":
    main()
