"""The commands `ragspec bench text`, `ragspec bench answers` and `ragspec bench image`."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from ragspec.errors import InputError
from ragspec.models.vocabulary import check_saved_draft
from ragspec.pipelines.bench import measure
from ragspec.pipelines.bench.answers import answers
from ragspec.pipelines.bench.images import ImageBenchOptions, build_images
from ragspec.pipelines.bench.prompts import bundled_items, items_of, read_turns
from ragspec.pipelines.console import checks
from ragspec.pipelines.console.options import PlaceOptions, StoreOptions, silence_transformers
from ragspec.pipelines.console.records import add_command, option, setting, split, takes_records
from ragspec.pipelines.console.terminal import Terminal

HELP_TEXT = "Measure variants side by side in one run: paired, interleaved, medians of ratios."
app = typer.Typer(no_args_is_help=True, help=HELP_TEXT)


@dataclass(frozen=True, slots=True)
class TextBenchOptions:
    """The variants of text decoding to compare, and their prompts."""

    place: PlaceOptions
    stores: StoreOptions
    json: Path | None = option(None, "Write the rows to this JSON file.")
    model: str = option("starter", "Name or folder of the target model.")
    draft_model: str = option("starter-draft", "Name or folder of the draft model; '' for none.")
    data: Path | None = option(
        None, "JSON lines of {id, category, prompt} or Spec-Bench rows. Default: bundled ones."
    )
    variants: str = option(
        ",".join(measure.DEFAULT_VARIANTS),
        f"Comma-separated: {', '.join(measure.PEERS)} (@N: N draft tokens a step), plain, "
        "names of `ragspec drafters`, folders of heads. A plus sign fuses drafters.",
    )
    budget: str = option("auto", "Draft nodes a step: 'auto' or a number.")
    items: int = option(64, "Most prompts of each category.", min=1)
    repeats: int = option(1, "Runs of each prompt in each variant.", min=1)
    new_tokens: int | None = setting(
        None, "Most new tokens of each prompt. Default: those of its row.", least=1
    )

    def __post_init__(self) -> None:
        checks.check_output(self.json, checks.JSON)
        checks.check_model(self.model)
        if self.draft_model:
            check_saved_draft(self.draft_model, self.model)
        if self.data is not None:
            checks.check_paths(self.data)
        checks.check_budget(self.budget)
        if not split(self.variants):
            raise InputError("Expected --variants plain,auto or others, got none. Name some.")
        drafters, stored = set[str](), self.stores.paths
        for name in split(self.variants):
            parts = measure.parts_of(name)
            checks.check_drafters(parts, (*measure.PEERS, "plain") if len(parts) == 1 else ())
            checks.check_need("store", parts, stored, checks.GIVE_STORE)
            drafters.update(parts)
        if stored:
            checks.check_stored(drafters or {"plain"})


@takes_records
def text(options: TextBenchOptions) -> None:
    """Compare variants of text decoding, transformers' modes among them, on the same prompts."""
    turns = None if options.data is None else read_turns(options.data)

    from ragspec.drafters.build import model_drafter
    from ragspec.engine.engine import Engine
    from ragspec.pipelines.bench.variants import build_variants

    silence_transformers()
    place = options.place.device, options.place.dtype
    terminal, draft = Terminal(), None
    with terminal.working("loading the models"):
        engine = Engine.from_pretrained(options.model, "context", None, options.budget, *place)
        if options.draft_model:
            draft = model_drafter(options.draft_model, engine.tokenizer, engine.target).model
    if turns is None:
        prompts = bundled_items(engine)
    else:
        prompts = items_of(turns, engine.tokenizer, engine.target.max_length)
    most = options.new_tokens or max(each.new_tokens for each in prompts)
    prompts = [
        replace(each, new_tokens=min(most, each.new_tokens))
        for group in measure.by_category(prompts).values()
        for each in group[: options.items]
    ]
    sources = options.stores.open(engine.tokenizer, engine.target)
    names = split(options.variants)
    built = build_variants(names, engine, draft, lambda: copy.deepcopy(engine.model), sources)
    if not built:
        raise InputError(
            f"Expected --variants that need no model, got {options.variants!r} and no "
            "--draft-model. Pass one."
        )
    with terminal.working("measuring") as show:
        rows = measure.run_benchmark(prompts, built, repeats=options.repeats, on_progress=show)
    kinds = ("model", "draft_model", "budget", "repeats", "items")
    facts = {name: getattr(options, name) for name in kinds}
    facts |= {"dtype": str(engine.model.dtype), "device": str(engine.model.device)}
    facts |= {name: path.name for name, path in options.stores.paths.items()}
    measure.show_results(rows, measure.choose_baseline(built), facts, options.json)


@takes_records
def image(options: ImageBenchOptions) -> None:
    """Compare variants of drawing on the same seeds: seconds, forwards and relaxation."""
    silence_transformers()
    items, built = build_images(options)
    with Terminal().working("drawing") as show:
        rows = measure.run_benchmark(items, built, skip_loops=False, on_progress=show)
    kinds = ("model", "budget", "images", "seed", "guidance", "temperature", "steps")
    facts = {name: getattr(options, name) for name in kinds}
    measure.show_results(rows, "plain", facts, options.json)


for command in (text, answers, image):
    add_command(app, command)
