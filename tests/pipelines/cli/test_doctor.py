"""`ragspec doctor`, the comparison of `--compare`, and `ragspec index`."""

import copy
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

import ragspec
from ragspec import Engine, Generation, Sampling
from ragspec.pipelines.cli import doctor
from ragspec.pipelines.cli.app import main
from ragspec.pipelines.cli.show import compare, margin_at
from ragspec.retrievers.search.passage_index import PassageIndex
from tests.support import tiny
from tests.support.command_line import Capture, output_of, run
from tests.support.toy_embedder import make_embedder


def test_doctor_reports_packages_and_device_as_json(capsys: Capture) -> None:
    result = run(capsys, "doctor")
    assert result["ragspec"] == ragspec.__version__
    assert result["packages"]["torch"] and not result["missing"]
    assert result["packages"].keys() >= {"transformers", "accelerate", "faiss-cpu"}
    device = result["device"]
    assert device["type"] and device["threads"] >= 1 and device["instructions"]
    assert "million weights on in 8 bits" in device["runtime"]


def test_packages_of_extras_are_optional(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def version(name: str) -> str:
        if name in absent:
            raise PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(doctor, "version", version)
    absent = {"faiss-cpu"}
    out = output_of(capsys, "doctor").out
    assert "This machine" in out and "Packages" in out and "Missing" not in out
    absent |= {"torch", "ragspec"}
    assert "Missing: torch" in output_of(capsys, "doctor", code=1).out
    monkeypatch.setattr(doctor, "requires", version)  # as without an installed package
    assert "Missing: ragspec" in output_of(capsys, "doctor", code=1).out


PROMPT = tiny.prompt(20, seed=3)


@pytest.fixture(scope="module")
def engine() -> Engine:
    model = copy.deepcopy(tiny.model())
    model.generation_config.eos_token_id = None  # random models end anywhere
    return Engine(model, None, drafter="context", budget=4)


def generate(engine: Engine, sampling: Sampling) -> Generation:
    generation: Generation = engine.generate(PROMPT, sampling, max_new_tokens=12)
    return generation


def test_an_unseeded_run_is_repeated_with_its_seed(engine: Engine) -> None:
    sampling = Sampling(temperature=1.0)
    speculative = generate(engine, sampling)
    seeded = replace(sampling, seed=speculative.report.seed)
    plain = generate(engine.with_drafter(None), seeded)
    assert plain.report.drafted == 0
    result = compare(engine, speculative, plain, seeded)
    assert result.equal and result.first_divergence is None
    assert result.ratio == pytest.approx(plain.report.seconds / speculative.report.seconds)
    decoding = plain.report.decode_seconds / speculative.report.decode_seconds
    assert result.decode_ratio == pytest.approx(decoding)
    assert "the same tokens" in result.summary()


def test_greedy_margin_is_the_distance_of_the_best_two_logits(engine: Engine) -> None:
    plain = generate(engine, Sampling())
    other = replace(plain, tokens=list(plain.tokens))
    other.tokens[5] = (other.tokens[5] + 1) % 96
    result = compare(engine, other, plain, Sampling()).first_divergence
    assert result is not None
    assert (result.index, result.plain, result.speculative) == (5, plain.tokens[5], other.tokens[5])
    ids = torch.tensor([[*PROMPT, *plain.tokens[:5]]])
    best = tiny.model()(ids).logits[0, -1].detach().topk(2)
    assert int(best.indices[0]) == plain.tokens[5]
    assert result.margin == pytest.approx(float(best.values[0] - best.values[1]), abs=1e-4)


def test_sampled_margin_belongs_to_the_token_that_was_sampled(engine: Engine) -> None:
    sampling = Sampling(temperature=0.9, top_k=20, seed=11)
    plain = generate(engine, sampling)
    margins = [margin_at(engine, plain, i, sampling) for i in range(len(plain.tokens))]
    assert all(margin > 0 for margin in margins)
    # Temperature is part of the choice: the same logits at another one have another margin.
    other = margin_at(engine, plain, 0, replace(sampling, temperature=0.5))
    assert other != pytest.approx(margins[0])


def test_a_shorter_text_differs_at_its_end(engine: Engine) -> None:
    plain = generate(engine, Sampling())
    result = compare(engine, replace(plain, tokens=plain.tokens[:4]), plain, Sampling())
    assert not result.equal and result.first_divergence is not None
    assert (result.first_divergence.index, result.first_divergence.speculative) == (4, None)
    assert "part at number 4" in result.summary()
    assert asdict(result)["first_divergence"]["plain"] == plain.tokens[4]


@pytest.fixture
def instance(tmp_path: Path, capsys: Capture) -> tuple[str, Path, str]:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "pets.txt").write_text("The cat is a pet. The dog is an animal.\n")
    (folder / "photo.png").write_bytes(b"x")
    embedder = str(make_embedder(tmp_path / "embedder"))
    out = str(tmp_path / "pages.idx")
    err = output_of(capsys, "index", "build", folder, "--out", out, "--embedder", embedder).err
    assert "wrote 1 document to" in err and "photo.png" in err
    return out, folder, embedder


def test_documents_are_added_and_removed(instance: tuple[str, Path, str], capsys: Capture) -> None:
    out, folder, _ = instance
    other = folder.parent / "rail.txt"
    other.write_text("The train has a wheel.")
    err = output_of(capsys, "index", "add", out, other).err
    assert "added 1: rail.txt\n1 document unchanged" in err
    (folder / "pets.txt").write_text("The cat sleeps.")
    assert "changed 1: pets.txt" in output_of(capsys, "index", "refresh", out).err
    assert "nothing has changed" in output_of(capsys, "index", "refresh", out).err
    assert "removed 1: rail.txt" in output_of(capsys, "index", "remove", out, "rail.txt").err
    assert [each.name for each in PassageIndex.open(out).documents] == ["pets.txt"]
    err = output_of(capsys, "index", "remove", out, "nothing.txt", code=2).err
    assert "no document of the index" in err


def test_info_lists_documents_and_paths(instance: tuple[str, Path, str], capsys: Capture) -> None:
    out, folder, embedder = instance
    text = output_of(capsys, "index", "info", out).out
    assert "1 document in 1 passage of at most about 105 words" in text
    assert "meaning" in text and "words" in text and str(folder) in text
    result = run(capsys, "index", "info", out)
    assert result["documents"][0]["name"] == "pets.txt" and result["embedder"] == embedder
    assert result["paths"] == [str(folder)] and result["bytes"] > 100
    assert "refresh" in output_of(capsys, "index", "--help").out


def test_repairs_are_counted_and_reported(instance: tuple[str, Path, str], capsys: Capture) -> None:
    out, folder, embedder = instance
    build = ["index", "build", str(folder), "--out", out, "--replace", "--embedder", embedder]
    add = ["index", "add", out, str(folder)]
    commands = (add, ["index", "refresh", out], build, ["index", "info", out])
    for number, command in enumerate(commands):
        for report, result in ([], "index info"), (["--report"], "cp1252 was guessed"):
            (folder / f"{len(report)}{number}.txt").write_bytes(b"Gr\xf6\xdfe")
            err = output_of(capsys, *command, *report).err
            assert result in err and ("cp1252" in err) is bool(report)


def test_an_approximate_index_is_named_and_refreshed_as_such(
    instance: tuple[str, Path, str], capsys: Capture
) -> None:
    pytest.importorskip("faiss")
    out, folder, embedder = instance
    again = ["index", "build", str(folder), "--out", out, "--embedder", embedder, "--replace"]
    assert main([*again, "--dense", "hnsw"]) == 0
    assert run(capsys, "index", "info", out)["dense"] == "hnsw"
    (folder / "pets.txt").write_text("The cat sleeps.")
    assert main(["index", "refresh", out]) == 0
    dense = PassageIndex.open(out).dense
    assert dense is not None and dense.nearest.kind == "hnsw"
    err = output_of(capsys, *again, "--dense", "flat", code=2).err.replace("│", "")
    assert "'flat' is not one of 'exact', 'hnsw'" in " ".join(err.split())
