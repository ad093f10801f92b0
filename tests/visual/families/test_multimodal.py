"""Images of prompts: Janus, Emu3 and Chameleon against the generation of transformers."""

import logging
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from ragspec import Sampling, errors
from ragspec.budget.base import FixedBudget
from ragspec.visual import ImagePipeline, VQTokenizer
from ragspec.visual.call import ImageCall
from tests.support import image_models, tiny_images, tiny_prompted
from tests.support.tiny_images import dice
from tests.support.tiny_prompted import BOOK, FIRST, LINE, SIDE, Seeded

FAMILIES = ("janus", "emu3", "chameleon")
KINDS = pytest.mark.parametrize("kind", FAMILIES)
PROMPTS = ["a red bicycle", "tree", "a blue cat a blue tree"]
SCALE = 3.0
IMAGE = {"generation_mode": "image", "do_sample": False}


def opened(kind: str, drafter: Any = "jacobi", rule: Any = "exact", **more: Any) -> Any:
    if kind == "chameleon":
        more.setdefault("vq", tiny_prompted.chameleon_vq().double())
    return ImagePipeline(
        tiny_prompted.model(kind), tiny_prompted.tokenizer(kind), drafter, rule, budget=6, **more
    )


def encoded(pipe: Any, prompt: Any, **call: Any) -> Any:
    """Return the token ids of prompts and of their unconditional prompts."""
    request = ImageCall(prompt=prompt, **call)
    conditions = pipe.family.conditions(request, pipe.family.sized(request.height, request.width))
    return [list(each) for each in zip(*conditions, strict=True)]


def sized(kind: str, height: int = SIDE, width: int = SIDE) -> dict[str, int]:
    """Return the size of a picture of so many codes, in pixels; Janus' own needs none."""
    return {"height": 2 * height, "width": 2 * width} if kind == "emu3" else {}


def padded(pipe: Any) -> Any:
    written = [f"User {text} *<boi>" for text in PROMPTS]
    return pipe.family.text_tokenizer(written, padding=True, return_tensors="pt")


def local_janus(pipe: Any, sampling: Sampling, seeds: list[int]) -> Any:
    """Return the codes [R, n] that the model's own generate draws, prompts padded by the tokenizer.

    Its noise is replaced by the project's, by a processor that comes last."""
    chosen = Seeded(sampling, seeds, list(range(BOOK)))

    class Guided(transformers.LogitsProcessor):  # type: ignore[misc, unused-ignore]
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            current, none = scores.chunk(2)
            return chosen(input_ids, none + SCALE * (current - none))

    last = transformers.LogitsProcessorList([Guided()])
    inputs = {**padded(pipe), **IMAGE, "guidance_scale": 1.0, "logits_processor": last}
    return pipe.model.generate(**inputs)


def test_janus_draws_what_its_generate_draws() -> None:
    pipe = opened("janus")
    out = pipe(PROMPTS, temperature=0.0, guidance_scale=SCALE, output_type="pt")
    sample = pipe.model.generate(**padded(pipe), **IMAGE, guidance_scale=SCALE)
    assert torch.equal(out.codes.flatten(1), sample)
    assert len({tuple(row) for row in sample.tolist()}) == len(PROMPTS)
    pictures = pipe.model.decode_image_tokens(sample).permute(0, 3, 1, 2).float()
    assert torch.equal(out.images, (pictures / 2 + 0.5).clamp(0, 1))
    assert out.label == "exact" and out.stats.forwards < len(PROMPTS) * SIDE**2


def test_sampled_janus_has_the_distribution_of_its_generate() -> None:
    for inputs in (Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=5)):
        pipe = opened("janus")
        request = {"temperature": inputs.temperature, "top_k": inputs.top_k}
        out = pipe(PROMPTS, guidance_scale=SCALE, generator=dice(), **request)
        sample = local_janus(pipe, inputs, list(out.stats.seeds))
        assert torch.equal(out.codes.flatten(1), sample)


def local_emu3(
    pipe: Any, text: str, negative: str, size: tuple[int, int], seeded: Any = None
) -> torch.Tensor:
    """Return the tokens that the model's own generate writes, ends of the picture included."""
    height, width = size
    tokens, model = pipe.family.text_tokenizer, pipe.model
    name = tokens.convert_tokens_to_ids
    ids, none = (
        tokens(f"<s>{each}<boi>{height}*{width}<first>", return_tensors="pt").input_ids
        for each in (text, negative)
    )

    def allowed(batch: int, written: torch.Tensor) -> Any:
        offset = len(written) - int((written == name("<first>")).nonzero()[0])
        ends = {(width + 1) * height + 1: "<eof>", (width + 1) * height + 2: "<eoi>"}
        if offset in ends:
            return [name(ends[offset])]
        if offset > max(ends):
            return [0]
        if offset % (width + 1) == 0:
            return [LINE]
        return model.model.vocabulary_mapping.image_tokens

    sample: torch.Tensor = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        prefix_allowed_tokens_fn=allowed,
        negative_prompt_ids=none,
        negative_prompt_attention_mask=torch.ones_like(none),
        guidance_scale=SCALE,
        logits_processor=seeded,
        do_sample=False,
        max_new_tokens=height * (width + 1) + 3,
    )
    return sample[:, ids.shape[1] :]


@pytest.mark.parametrize("size", [(SIDE, SIDE), (2, 5), (4, 1)])
@pytest.mark.parametrize(
    ("negative", "draw"),
    [("", Sampling()), ("a blue cat", Sampling()), ("cat", Sampling(temperature=0.9, top_k=7))],
)
def test_emu3_draws_what_its_generate_draws(size: Any, negative: str, draw: Sampling) -> None:
    pipe = opened("emu3")
    record: dict[str, Any] = {"temperature": draw.temperature, "top_k": draw.top_k}
    record |= {"guidance_scale": SCALE, **sized("emu3", *size)}
    out = pipe(PROMPTS, negative_prompt=negative, output_type="pt", **record)
    assert out.codes.shape == (len(PROMPTS), *size) == out.acceptance_map.shape
    assert pipe.family.top_k == 2048
    assert out.stats.excess.shape == out.codes.shape
    assert out.stats.nll_gaps.size <= out.codes.numel()
    for row, text in enumerate(PROMPTS):
        seeded = Seeded(draw, [out.stats.seeds[row]], [*range(FIRST, FIRST + BOOK), LINE])
        last = transformers.LogitsProcessorList([seeded] if draw.temperature else [])
        sample = local_emu3(pipe, text, negative, size, last)
        known = sample[:, :-3].reshape(size[0], size[1] + 1)
        assert torch.equal(out.codes[row], known[:, :-1] - FIRST)
        picture = pipe.model.model.decode_image_tokens(sample, *size).float()
        assert torch.equal(out.images[row], (picture[0] / 2 + 0.5).clamp(0, 1))
    if not negative:
        assert torch.equal(pipe(PROMPTS, **record).codes, out.codes)


def local_chameleon(model: Any, ids: Any, none: Any, codes: list[int], width: int = 9) -> Any:
    """Return guided logits by whole forwards, as its generate draws no code; the last ends rows."""
    known = {**model.model.vocabulary_mapping.img2bpe, BOOK: LINE}
    sample = [known[code] for code in codes]
    current, beside = (
        model.lm_head(model.model(torch.tensor([each + sample])).last_hidden_state[:, -1])
        for each in (ids, none)
    )
    guided = (beside + SCALE * (current - beside))[:, [known[code] for code in sorted(known)]]
    guided[:, slice(BOOK) if len(codes) % (width + 1) == width else BOOK] = -torch.inf
    return guided


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("negative", [None, "blue cat"])
def test_chameleon_draws_codes_alone(negative: str | None, temperature: float) -> None:
    pipe = opened("chameleon")
    request = {"guidance_scale": SCALE, "temperature": temperature, "negative_prompt": negative}
    out = pipe(PROMPTS, generator=dice(), output_type="pt", **request)
    for row, text in enumerate(PROMPTS):
        read = pipe.family.text_tokenizer
        ids = read(f"{text}<sep><boi>").input_ids
        none = read("<boi>" if negative is None else f"{negative}<sep><boi>").input_ids
        logits = partial(local_chameleon, pipe.model, ids, none)
        sampling, seed = Sampling(temperature=temperature), out.stats.seeds[row]
        expected = image_models.decode(logits, sampling, seed, count=SIDE**2)
        assert out.codes[row].flatten().tolist() == expected
    decoder = tiny_prompted.chameleon_vq().double()
    entry = decoder.quantize.embedding(out.codes).permute(0, 3, 1, 2)
    with torch.no_grad():
        pictures = decoder.decoder(decoder.post_quant_conv(entry)).float()
    assert torch.allclose(out.images, (pictures / 2 + 0.5).clamp(0, 1), atol=1e-6)


@pytest.mark.parametrize("drafter", [None, "jacobi", "model"])
@pytest.mark.parametrize("negative", [None, "blue cat"])
def test_lumina_draws_rows_after_the_size(drafter: Any, negative: Any, tmp_path: Path) -> None:
    folder = tiny_prompted.save_lumina(tmp_path / "one")
    request = {"height": 4, "width": 8, "guidance_scale": SCALE, "negative_prompt": negative}
    with patch.object(logging.Logger, "callHandlers") as call_handlers:
        pipe = ImagePipeline.from_pretrained(folder, drafter, "exact", dtype=torch.float64)
    assert not call_handlers.called
    out = pipe("red cat", generator=dice(), output_type="pt", **request)
    read = pipe.family.text_tokenizer
    words = "Generate an image of 8x4 according to the following prompt:\n{}<sep>"
    size = [read.convert_tokens_to_ids("<boi>"), 1, 2]  # two and four codes
    ids, none = (read(words.format(text)).input_ids + size for text in ("red cat", negative))
    logits = partial(local_chameleon, pipe.model, ids, none if negative else size, width=4)
    rows = image_models.decode(logits, Sampling(temperature=1.0), out.stats.seeds[0], count=10)
    assert out.codes[0].tolist() == [rows[:4], rows[5:9]] and out.images.shape == (1, 3, 4, 8)
    norm = pipe.model.model.layers[1].self_attn.q_norm.weight
    assert torch.equal(norm, norm[:1].expand_as(norm)) and norm[0].std() > 0
    pipe.save_pretrained(tmp_path / "two")
    assert pipe.family.top_k == 2000
    pipe.family.top_k = 1  # the default of calls
    best = pipe("red cat", temperature=0.0, **request)
    assert torch.equal(pipe("red cat", generator=dice(), **request).codes, best.codes)
    again = ImagePipeline.from_pretrained(tmp_path / "two", dtype=torch.float64)
    assert torch.equal(again("red cat", generator=dice(), **request).codes, out.codes)
    for height, message in ((6, "a multiple of 4 pixels"), (12, "got an image .* at most 8 in")):
        with pytest.raises(errors.InputError, match=message):
            pipe("red cat", height=height)
    (folder / "vq").rename(tmp_path / "vq")
    with pytest.raises(errors.ModelError, match=r"no code-book\. Expected vq=PATH"):
        ImagePipeline.from_pretrained(folder)


@KINDS
def test_drafters_and_batches_change_no_image(kind: str) -> None:
    message, request = {"guidance_scale": SCALE, **sized(kind)}, PROMPTS[1:]
    plain = opened(kind, None)(request, generator=dice(), num_images_per_prompt=2, **message)
    for drafter in ("auto", ["jacobi", tiny_prompted.model(kind, 1)]):
        pipe = opened(kind, drafter, batch_size=3)
        out = pipe(request, generator=dice(), num_images_per_prompt=2, **message)
        assert torch.equal(out.codes, plain.codes) and out.label == "exact"
        assert out.stats.forwards < plain.stats.forwards
        assert torch.equal(pipe(request[0], generator=dice(), **message).codes[0], plain.codes[0])


def test_neighbours_are_those_of_the_code_book_of_the_model() -> None:
    for kind in FAMILIES:
        rule = opened(kind, rule="lantern", neighbours=3).rule
        book = tiny_prompted.model(kind).model.vqmodel.quantize.embedding.weight.detach()
        if kind == "janus":
            book = torch.nn.functional.normalize(book, dim=-1)
        difference = torch.cdist(book, book).fill_diagonal_(float("inf"))
        nearest = difference.topk(3, largest=False).indices
        assert rule.near[:BOOK].tolist() == nearest.tolist()
        assert rule.near[BOOK:].tolist() == ([[BOOK] * 3] if kind == "emu3" else [])


@KINDS
def test_fixed_codes_stay_and_the_others_are_generated(kind: str) -> None:
    record = {"guidance_scale": 2.0, **sized(kind)}
    whole = opened(kind)("a cat", generator=dice(), **record).codes
    inputs = whole[0].clone()
    inputs[1, 1] = inputs[2, :2] = -1
    one = tiny_prompted.model(kind, 1)  # its drafts do not depend on the fixed codes
    alike = opened(kind, one, "gsd", partition=1)("a cat", generator=dice(), codes=inputs, **record)
    assert torch.equal(alike.codes[0][inputs >= 0], whole[0][inputs >= 0])
    assert alike.label == "approximate"
    assert torch.equal(opened(kind)("a cat", generator=dice(), codes=inputs, **record).codes, whole)
    with pytest.raises(errors.InputError, match="to be drawn"):
        opened(kind)("a cat", codes=torch.full((SIDE, SIDE), BOOK), **record)


@KINDS
def test_a_saved_folder_has_all_models_and_settings(kind: str, tmp_path: Path) -> None:
    folder, saved = tiny_prompted.save(tmp_path / "one", kind), tmp_path / "two"
    if kind == "chameleon":
        tiny_prompted.chameleon_vq().save_pretrained(folder / "vq")
    inputs: dict[str, Any] = {"rule": "lantern", "delta": 0.9, "neighbours": 20, "budget": 5}
    pipe = ImagePipeline.from_pretrained(folder, "model", **inputs, batch_size=2)
    pipe.save_pretrained(saved)
    again = ImagePipeline.from_pretrained(saved, device="cpu")  # the draft model goes along
    assert (again.rule_name, again.budget, again.batch_size) == ("lantern", FixedBudget(5), 2)
    outs = []
    for each in (pipe, again):
        outs.append(each(PROMPTS, generator=dice(), guidance_scale=SCALE, **sized(kind)))
        assert outs[-1].images[0].size == (2 * SIDE, 2 * SIDE)
        assert ImagePipeline(**each.components, drafter=None).model is each.model
    assert torch.equal(outs[0].codes, outs[1].codes) and outs[1].label == "approximate"
    other = ImagePipeline.from_pretrained(saved, None, "exact")  # named: nothing is taken
    assert (other.rule_name, other.batch_size) == ("exact", 4)
    other.save_pretrained(tmp_path / "three")  # the draft model, which is not in use, goes along
    assert ImagePipeline.from_pretrained(tmp_path / "three", "model").draft is not None
    for wrong in {*FAMILIES} - {kind}:
        with pytest.raises(errors.UnsupportedModelError, match=f"Use family='{kind}'"):
            ImagePipeline.from_pretrained(folder, family=wrong)
    (saved / "ragspec.json").write_text("[", encoding="utf-8")
    with pytest.raises(errors.ModelError, match=r"ragspec\.json cannot be read"):
        ImagePipeline.from_pretrained(saved)


@KINDS
def test_bad_input_is_refused(kind: str) -> None:
    pipe = opened(kind)
    prompts: tuple[Any, ...] = ("", "  ", 3, ["a cat", None], [])
    more: dict[str, tuple[Any, ...]] = {"height": (5, "4"), "width": (0, -2, 4.0, True)}
    more |= {"negative_prompt": (3, ["a", "b"]), "generator": (3,), "class_labels": (3,)}
    wrong: list[dict[str, Any]] = [{"prompt": prompt} for prompt in prompts]
    wrong += [{}, {"prompt": "cat", "height": 2000, "width": 2000}]
    wrong += [{"prompt": "cat", name: v} for name, values in more.items() for v in values]
    for inputs in wrong:
        with pytest.raises(errors.InputError, match=r"expected|maximum|Leave"):
            pipe(**{**sized(kind), **inputs})


def test_what_does_not_fit_is_refused() -> None:
    janus, text = tiny_prompted.model("janus"), tiny_prompted.tokenizer("janus")
    with pytest.raises(errors.InputError, match="padding for words"):
        opened("janus")("cat", negative_prompt="dog")
    with pytest.raises(errors.UnsupportedModelError, match="Use family='janus'"):
        ImagePipeline(janus, text, family="emu3")
    with pytest.raises(errors.UnsupportedModelError, match="LlamaGenModel of type 'llamagen'"):
        ImagePipeline(tiny_images.model(), text, family="janus")
    with pytest.raises(errors.InputError, match="the model's processor"):
        ImagePipeline(janus, tiny_images.tokenizer(), None)
    with pytest.raises(errors.TokenizerMismatchError, match="type 'emu3'"):
        opened("janus", tiny_prompted.model("emu3"))
    with pytest.raises(errors.InputError, match=r"do not end|without boi_token"):
        ImagePipeline(janus, bare(), None)("a cat")
    for other in (tiny_images.tokenizer(30), tiny_images.tokenizer(tiny_prompted.BOOK).model):
        with pytest.raises(errors.TokenizerMismatchError, match="not the model's"):
            opened("chameleon", vq=other)


def bare() -> Any:
    """Return a tokenizer that knows no images."""
    instance = Tokenizer(models.WordLevel({"<unk>": 0, "cat": 1}, unk_token="<unk>"))
    instance.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=instance, unk_token="<unk>")


def test_chameleon_without_a_decoder_says_what_to_give() -> None:
    pipe = opened("chameleon", vq=None)
    out = pipe("a cat", output_type="latent", generator=dice())
    assert torch.equal(out.images, out.codes)
    for image, inputs in ((pipe, "a cat"), (pipe.decode, out.codes)):
        with pytest.raises(errors.ModelError, match=r"vq=PATH.*vqgan\.ckpt"):
            image(inputs)
    decoder = VQTokenizer(tiny_prompted.chameleon_vq(), normalised=False)
    assert opened("chameleon", vq=decoder).decode(out.codes)[0].size == (2 * SIDE, 2 * SIDE)


def test_prompts_are_read_as_by_the_models_processors() -> None:
    words = tiny_prompted.tokenizer("emu3")
    words.image_token_id = words.convert_tokens_to_ids("<image>")
    emu3 = transformers.Emu3Processor(transformers.Emu3ImageProcessor(), words)
    size = {"return_for_image_generation": True, "ratio": "2:1", "image_area": 512}
    read = emu3(text=PROMPTS, padding=True, **size)
    height, width = read["image_sizes"][0]
    pipe = ImagePipeline(tiny_prompted.model("emu3"), emu3, None)
    current, none = encoded(pipe, PROMPTS, height=2 * height, width=2 * width)
    assert current == unpadded(read) and (height, width) == (2, 4)
    nothing = emu3(text=[""], **size)
    assert none == unpadded(nothing) * len(PROMPTS)

    parts = transformers.JanusImageProcessor(), tiny_prompted.tokenizer("janus")
    janus = transformers.JanusProcessor(*parts, chat_template=tiny_prompted.CHAT)
    requests = [[{"role": "user", "content": [{"type": "text", "text": text}]}] for text in PROMPTS]
    chat = janus.apply_chat_template(requests, add_generation_prompt=True)
    read = janus(text=chat, generation_mode="image", padding=True)
    for processor in (janus, janus.tokenizer):
        pipe = ImagePipeline(tiny_prompted.model("janus"), processor, None)
        assert encoded(pipe, PROMPTS)[0] == unpadded(read)
    janus.tokenizer.chat_template = None
    pipe = ImagePipeline(tiny_prompted.model("janus"), janus.tokenizer, None)
    words = janus.tokenizer.convert_ids_to_tokens(encoded(pipe, "red cat")[0][0])
    assert words[-1] == "<boi>"
    assert [word for word in words if word in ("red", "cat", "User")] == ["User", "red", "cat"]
    assert pipe.family._in_template(" red\n") == pipe.family._in_template("red")


def unpadded(read: Any) -> list[list[int]]:
    return [
        [int(token) for token, current in zip(ids, mask, strict=True) if current]
        for ids, mask in zip(read["input_ids"], read["attention_mask"], strict=True)
    ]


def test_a_callback_is_reported_codes_alone() -> None:
    pipe, known = opened("emu3"), []
    look = {"callback_on_step_end": lambda *args: known.append((args[2], args[3]["codes"]))}
    out = pipe("a cat", generator=dice(), **look, **sized("emu3", 2, 4))
    assert known[-1][0] == 8 and torch.equal(known[-1][1], out.codes.flatten(1))
    for codes, tensor in known:
        assert int((tensor >= 0).sum()) == codes and int(tensor.max()) < BOOK
