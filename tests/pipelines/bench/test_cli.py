"""`ragspec bench text` and `bench image` from end to end, on tiny models."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from ragspec.errors import InputError
from ragspec.pipelines.bench.cli import app
from tests.support import tiny, tiny_images, tiny_latents, tiny_masked


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    instance = tmp_path_factory.mktemp("tiny")
    tiny.save(instance)
    rows = [{"id": i, "category": "qa", "prompt": f"ab ab {i}"} for i in range(3)]
    (instance / "data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return instance


def main(arguments: list[str]) -> int:
    return app(arguments, standalone_mode=False) or 0


def bench(folder: Path, *more: str) -> int:
    common = ["--model", str(folder), "--draft-model", "", "--budget", "4", "-s", "device=cpu"]
    return main(["text", *common, "--data", str(folder / "data.jsonl"), *more])


def test_a_run_prints_a_table_and_writes_its_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "rows.json"
    options = ("--items", "2", "-s", "new-tokens=5", "--json", str(written))
    assert bench(folder, "--variants", "hf-greedy,plain,context,fused,hf-assistant", *options) == 0
    out, err = capsys.readouterr()
    assert "hf-greedy" in out and "measuring ..." in err
    document = json.loads(written.read_text(encoding="utf-8"))
    assert (document["baseline"], document["items"]) == ("hf-greedy", 2)
    assert [row["variant"] for row in document["rows"]] == ["hf-greedy", "plain", "context"]
    assert all(row["items"] == 2 and row["equal_to_plain"] == 1.0 for row in document["rows"])


@pytest.mark.parametrize(
    ("family", "variants", "labels"),
    [
        (tiny_images, "exact:jacobi+model,lantern@0.2", ["exact", "exact", "approximate"]),
        (tiny_latents, "near@0.02,fewer@2", ["exact", "approximate", "exact"]),
        (tiny_masked, "aligned,fewer@4", ["exact", "exact-for", "exact"]),
    ],
)
def test_images_are_sampled_in_every_variant_on_the_same_seeds(
    tmp_path: Path, family: ModuleType, variants: str, labels: list[str]
) -> None:
    written = tmp_path / "rows.json"
    steps = [] if family is tiny_images else ["--steps", "4"]
    command = ["image", "--model", str(family.save(tmp_path / "model")), "--images", "3", *steps]
    assert main([*command, "--variants", variants, "--json", str(written)]) == 0
    rows = json.loads(written.read_text(encoding="utf-8"))["rows"]
    assert [row["variant"] for row in rows] == ["plain", *variants.split(",")]
    assert [row["label"].split("(")[0] for row in rows] == labels
    assert rows[0]["equal_to_plain"] == rows[0]["ratio"] == 1.0
    if family is tiny_images:
        assert rows[1]["equal_to_plain"] == 1.0 and rows[1]["forwards"] <= rows[0]["forwards"]
        assert rows[2]["tv_excess"] == pytest.approx(1 / 27), "one code of three pictures of nine"


def test_variants_of_a_draft_model_are_refused_without_one(folder: Path) -> None:
    for variants in ("fused", "model,fused"):
        with pytest.raises(InputError, match="Expected --variants"):
            bench(folder, "--variants", variants)
