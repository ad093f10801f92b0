"""The benchmark scripts run on generated data."""

import ast
import gzip
import importlib
import importlib.util
import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ragspec.drafters.heads.files import save_head
from ragspec.verification.causal import CausalTarget
from tests.support import heads, tiny
from tests.support import tiny_latents as models
from tests.support.scripts import run_script

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"
WORDS = " ".join(f"word{i}" for i in range(300))


def run(script: str, *arguments: str | Path) -> str:
    return run_script(SCRIPTS / script, *arguments)


def figures_of(folder: Path, script: str, *arguments: str | Path) -> tuple[str, Any]:
    """Run a script; return what it printed and, by way of a file in the folder, its figures."""
    out = folder / "figures.json"
    printed = run(script, *arguments, "--json", out)
    return printed, json.loads(out.read_text(encoding="utf-8"))


def write_gzip(path: Path, value: Any) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(value, file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny model, its tokenizer, and data in the layout of the scripts."""
    data = tmp_path_factory.mktemp("data")
    tiny.save(data)
    prompts = [{"ids": [5, 6, 7, 8, 9, 5, 6, 7]}, {"ids": [3, 4, 3, 4]}, {"ids": [1, 2]}]
    (data / "prompts.json").write_text(json.dumps({"prompts": prompts}), encoding="utf-8")
    write_gzip(data / "store.json.gz", [[5, 6, 7, 8, 40, 41], [3, 4, 50, 51]])
    write_gzip(data / "history.json.gz", [{"prompt": [3, 4], "answer": [3, 4, 60]}])
    (data / "docqa").mkdir()
    document = {"doc_id": "d", "title": "Words", "text": WORDS}
    write_gzip(data / "docqa" / "documents.jsonl.gz", document)
    quote = "word200 word201 word202"
    start = WORDS.index(quote)
    facts: dict[str, Any] = {"id": "1", "split": "valid", "tier": "words", "doc_id": "d"}
    words = {"question": "Which words?", "answers": ["word201"], "evidence": quote}
    item = facts | words | {"evidence_span": [start, start + 23]}
    (data / "docqa" / "items.jsonl").write_text(json.dumps(item), encoding="utf-8")
    (data / "longdocs").mkdir()
    with gzip.open(data / "longdocs" / "w.txt.gz", "wt", encoding="utf-8") as file:
        file.write(WORDS)
    index = {"name": "w", "file": "w.txt.gz", "title": "Words"}
    (data / "longdocs" / "index.jsonl").write_text(json.dumps(index), encoding="utf-8")
    task: dict[str, Any] = {"id": "w-0", "doc": "w", "query": "Quote it.", "cue": "word200 word201"}
    task["reference_span"] = [start + 16, start + 39]
    (data / "longdocs" / "quote_tasks.jsonl").write_text(json.dumps(task), encoding="utf-8")
    return data


def test_probe(folder: Path, tmp_path: Path) -> None:
    methods = "context,rest,suffix-history,auto"
    options = ("--limit", "2", "--methods", methods, "--budgets", "4,auto")
    printed, figures = figures_of(tmp_path, "probe.py", "--data", folder, *options)
    rows = {(row["method"], row["budget"]): row for row in figures["rows"]}
    assert set(rows) == {("plain", 0)} | {(m, b) for m in methods.split(",") for b in (4, "auto")}
    plain = rows["plain", 0]
    assert plain["nodes"] == plain["tokens_per_forward"] == plain["ratio_plain"] == 1.0
    for row in rows.values():
        assert row["tokens"] == plain["tokens"]
        assert row["equal"] == row["prompts"] == 2
        assert row["forwards"] <= plain["forwards"]
        assert row["budget"] == "auto" or row["nodes"] <= max(row["budget"], 1)
        assert row["faults"] == {}
    assert rows["auto", 4]["nodes"] > 1
    assert "| auto | 4 |" in printed


def test_bench_commands_have_help_and_images_are_measured() -> None:
    for command in ("image", "knn", "long", "retrieval", "store"):
        assert "--json" in run("bench.py", command, "--help")
    assert "\n│ exact " in run("bench.py", "image", "--variants", "exact", "--images", "1")


def test_probe_refuses_unknown_methods(folder: Path) -> None:
    with pytest.raises(AssertionError, match="unknown method 'rets'"):
        run("probe.py", "--data", folder, "--methods", "rets")


def test_gold(folder: Path, tmp_path: Path) -> None:
    options = ("--methods", "plain,lookup,context", "--window", "300")
    places = ("--data", folder, "--model", folder)
    printed, figures = figures_of(tmp_path, "gold.py", *places, *options)
    assert figures["simulated"] is True
    rows = {(row["category"], row["method"]): row for row in figures["rows"]}
    assert {category for category, _ in rows} == {"words", "quotation"}
    for category in ("words", "quotation"):
        assert rows[category, "plain"]["tokens_per_step"] == 1.0
        assert rows[category, "context"]["tokens_per_step"] > 2.0
        assert rows[category, "context"]["nodes"] <= 11
    assert "| quotation |" in printed


def test_budget(tmp_path: Path) -> None:
    options = ("--groups", "copies,free", "--prompts", "2", "--tokens", "8", "--budgets", "4,8")
    printed, figures = figures_of(tmp_path, "budget.py", *options)
    assert {row["group"] for row in figures["rows"]} == {"copies", "free"}
    assert {row["variant"] for row in figures["rows"]} == {"plain", "auto", "4", "8"}
    for kind in ("gate", "gate_of_medians"):
        assert set(figures[kind]) == {"of_best", "of_plain"}
    assert "| cpu | copies | free | mean |" in printed


def test_text_categories(folder: Path, tmp_path: Path) -> None:
    printed, figures = figures_of(
        *(tmp_path, "text.py", "--data", folder, "--model", folder, "--draft-model", ""),
        *("--categories", "quotation,code", "--items", "1", "--variants", "plain,context"),
        *("--budget", "3", "--device", "cpu"),
    )
    rows = figures["rows"]
    expected = [(c, m) for c in ("quotation", "code") for m in ("plain", "context")]
    assert [(row["category"], row["variant"]) for row in rows] == expected
    assert all(row["equal_to_plain"] == 1.0 for row in rows)
    assert "quotation" in printed


def test_distractors(folder: Path, tmp_path: Path) -> None:
    manual = " ".join(f"word{i % 40}" for i in range(500))
    (tmp_path / "lm").mkdir()
    (tmp_path / "longdocs").symlink_to(folder / "longdocs")
    for name in ("train", "valid"):
        row = {"kind": "docs", "doc": "manual/page", "text": manual}
        write_gzip(tmp_path / "lm" / f"{name}.jsonl.gz", row)
    places = ("--data", tmp_path, "--model", folder)
    _, figures = figures_of(tmp_path, "distractors.py", *places, "--budget", "6")
    (row,) = figures["rows"]
    assert figures["simulated"] is True
    assert (figures["others"], row["manual"]) == (1, "manual")
    assert row["alone"] > 3.0
    assert figures["share"] == row["share"] == round(row["beside"] / row["alone"], 4)


def test_lengths(folder: Path) -> None:
    options = ("--lengths", "40,120", "--repeats", "1")
    printed = run("lengths.py", "--data", folder, "--model", folder, *options)
    rows = [line for line in printed.splitlines() if line.startswith(("| 40 |", "| 120 |"))]
    assert len(rows) == 2 and all(len(line.split("|")) == 8 for line in rows)


def test_windowed_prompts(tmp_path: Path) -> None:
    options = ("--tokens", "200", "--window", "64", "--against", SCRIPTS.parent)
    printed, figures = figures_of(tmp_path, "windowed_prompts.py", *options)
    rows = figures["rows"]
    assert [row["checkout"] for row in rows] == ["here", "against"]
    assert rows[0]["checksum"] == rows[1]["checksum"] != 0, "one and the same checkout"
    assert rows[1]["ratio"] == 1.0 < rows[0]["cache_MB"] < rows[0]["grown_MB"]
    assert "| 200 | here |" in printed


def test_answers(folder: Path, tmp_path: Path) -> None:
    printed, figures = figures_of(
        *(tmp_path, "answers.py", "--data", folder, "--model", "starter", "--sets", "docqa"),
        *("--half", "tune", "--prompts", "quote", "--tokens", "24"),
    )
    (row,) = figures["quote"]
    assert row["passages"] is True and row["tokens"] <= 24 and not row["refused"]
    assert "'passages hold an answer': '100.0% of 1'" in printed


def test_long_documents(folder: Path, tmp_path: Path) -> None:
    _, figures = figures_of(
        *(tmp_path, "long_documents.py", "--data", folder, "--model", folder),
        *("--tokens", "60", "--documents", "1", "--dtype", "float32", "--start", "10"),
    )
    (row,) = figures["rows"]
    assert row["equal"] and row["tokens"] > 60 and row["memory, first"] > 0
    both = product(("memory", "disk"), ("first", "whole"))
    assert set(figures["ratios"]) == {f"restart to {variant}, {span}" for variant, span in both}


def test_long_heads(folder: Path, tmp_path: Path) -> None:
    head = tmp_path / "head"
    save_head(heads.fresh(CausalTarget(tiny.model("llama"))), head)
    _, figures = figures_of(
        *(tmp_path, "long_heads.py", "--data", folder, "--model", folder, "--head", head),
        *("--tokens", "60", "--documents", "1", "--questions", "3", "--dtype", "float32"),
        *("--start", "10", "--new-tokens", "12", "--budget", "4"),
    )
    assert len(figures["rows"]) == 3
    for row in figures["rows"]:
        assert row["equal"]
        assert row["variants"]["head"]["head"] > 0 == row["variants"]["auto"]["head"]
    plain = figures["figures"]["plain"]
    assert plain["decode"] == plain["tokens a forward"] == 1


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny model of continuous latents."""
    return models.save(tmp_path_factory.mktemp("latents"))


def test_latent_paths(latents: Path, tmp_path: Path) -> None:
    inputs = ("--images", "5", "--batch", "3", "--variants", "plain,aligned,path")
    printed, figures = figures_of(tmp_path, "latent_paths.py", "--model", latents, *inputs)
    assert list(figures) == ["plain", "aligned", "path"]
    noise = [float(each) for each in printed.splitlines()[0].split()[1:]]
    # The steps of plain drawing are the seeds' noise.
    assert figures["plain"]["by_step"] == pytest.approx(noise, abs=1e-3)
    for row in figures.values():
        assert row["images"] == 5 and row["latents"] == 5 * models.SIDE**2
        assert len(row["by_step"]) == 5 and 0.5 < row["total"] < 1.5
    assert "path         5 images: all steps" in printed


def test_latent_curves(latents: Path, tmp_path: Path) -> None:
    inputs = ("--images", "1", "--only", "r")
    _, rows = figures_of(tmp_path, "latent_curves.py", "--model", latents, *inputs)
    assert {(row["varied"], row["window"]) for row in rows} == {("r", 12)}
    plain = [row for row in rows if row["variant"] == "plain"]
    assert all(row["codes_per_forward"] == row["ratio"] == 1.0 for row in plain)
    assert all(row["codes_per_forward"] > 1.0 for row in rows if row["variant"] == "near@0.2")


def test_image_sizes(tmp_path: Path) -> None:
    _, figures = figures_of(tmp_path, "image_sizes.py", "--small", "--draw", "--repeats", "1")
    assert figures["label"] == "random weights" and figures["size"] == "small"
    table = figures["table"]
    assert table["table_MB"] == 4 * table["codes"] * table["k"] / 1e6
    plain, *others = figures["pictures"]
    assert plain["forwards"] == 16 and len(others) == 3
    for row in others:
        assert row["forwards"] < 16
        assert row["label"] != "exact" or row["equal_to_plain"] == 1.0


def test_server(tmp_path: Path) -> None:
    options = ("--only", "stream,prediction,soak", "--rounds", "1", "--requests", "12")
    _, figures = figures_of(tmp_path, "server.py", *options)
    assert figures["stream"]["token_ratio"] > 0 < figures["stream"]["first_ms"][1]
    assert figures["prediction"]["right"] > 3 * figures["prediction"]["none"] / 2
    assert figures["soak"]["requests"] == 12 and figures["soak"]["threads"][0] > 1


def test_gpu_probe(tmp_path: Path) -> None:
    options = ("--small", "--device", "cpu", "--repeats", "1")
    printed, figures = figures_of(tmp_path, "gpu_probe.py", *options)
    assert figures["device"] == "cpu" and figures["versions"]["torch"] == torch.__version__
    assert figures["weight_bytes"] < 4 * figures["parameters"] and figures["copy_GB_per_second"] > 0
    cells = {
        (*(row[k] for k in ("part", "batch", "length", "rows", "distribution", "mode")),): row
        for row in figures["cases"]
    }
    lengths, rows, modes = (48, 96, 192), (1, 16, 32), ("off", "eager")
    assert set(cells) == {
        *product(["single"], [1], lengths, rows, ["greedy"], modes),
        *product(["batch"], [4], lengths, rows, ["greedy", "top-p"], modes),
        *product(["context", "draft"], [1], lengths[:2], [None], ["greedy"], modes),
    }
    for (part, _, _, n, distribution, _), row in cells.items():
        times = ("ms", "ms_q1", "ms_q3", "floor_ms", "over_floor", "verify_ms", "operators")
        assert all(row[name] > 0 for name in times) and row["ms_q1"] <= row["ms_q3"]
        # Two of a stub's nodes are right, all of the context's and of the draft model's.
        tokens = {"context": 16, "draft": 6}.get(part, 1 if n == 1 else 3)
        assert (row["tokens"], row["nodes"]) == (tokens, tokens - 1 if n is None else n - 1)
        assert ("forward_ms" in row) == ((n, distribution) == (16, "top-p"))
    assert len(figures["bars"]) > 5
    for bar in figures["bars"]:
        assert (bar["measured"], bar["met"]) == ("not measured", None)
    assert "| 32 rows over plain at 32768 | <= 1.3 | not measured |" in printed


def test_gpu_text(tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"id": "1", "category": "docqa", "prompt": "A generator is"}\n')
    options = "--draft-model", "", "--drafters", "plain,context,model", "--data", data
    _, figures = figures_of(tmp_path, "gpu_text.py", *options, "--repeats", "1")
    rows = figures["rows"]
    ours = map(" ".join, product(("plain", "context"), ("off", "eager")))
    assert {row["variant"] for row in rows} == {"hf-greedy", "hf-lookup", *ours}
    assert {(row["category"], row["equal_to_plain"]) for row in rows} == {("docqa", 1.0)}


def test_gpu_probe_requires_an_accelerator(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    probe = importlib.import_module("gpu_probe")
    for inputs, error in (
        (["--device", "cpu"], "got cpu without --small; expected a CUDA device"),
        (["--device", "cpu", "--small", "--modes", "graph"], "got --modes graph for cpu"),
        (["--device", "tpu9"], "device 'tpu9' is unknown to torch"),
        (["--small", "--only", "single,signle"], "got --only 'signle'; expected some of single"),
        (["--small", "--repeats", "0"], "got --repeats 0; expected at least 1"),
    ):
        monkeypatch.setattr(sys, "argv", ["gpu_probe.py", *inputs])
        with pytest.raises(SystemExit) as ended:
            probe.main()
        assert ended.value.code == 2 and error in capsys.readouterr().err


def test_gpu_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    bars = importlib.import_module("gpu_bars").bars

    def row(mode: str, n: int, ms: float, length: int = 512, **more: Any) -> dict[str, Any]:
        of = {"part": "single", "batch": 1, "distribution": "greedy", "over_floor": ms / 5}
        return {**of, "length": length, "rows": n, "mode": mode, "ms": ms, **more}

    rows = [
        row("off", 1, 9.0),
        row("graph", 1, 6.5),
        row("compile", 1, 6.0),
        row("graph", 32, 7.0),
        row("graph", 16, 9.0, part="batch", batch=16, distribution="top-p", forward_ms=7.5),
        row("graph", 1, 5.0, 4096),
        {"part": "single", "length": 4096, "rows": 32, "mode": "graph", "skipped": "memory ended"},
    ]
    measured = bars(rows, measured=True)
    fields = {bar["name"]: (bar["measured"], bar["mode"], bar["met"]) for bar in measured}
    assert fields["plain at 512 over its bytes"] == (1.2, "compile", True)
    assert fields["plain at 512 over its bytes (stretch)"] == (1.2, "compile", False)
    assert fields["32 rows over plain at 512"] == (1.0769, "graph", True)
    assert fields["16 texts of 16 rows, top-p, at 512: step over forward"] == (1.2, "graph", False)
    assert fields["graph against today's step, 1 rows at 512"] == (1.3846, "graph", False)
    assert fields["32 rows over plain at 4096"] == ("not measured", None, None)
    assert {bar["measured"] for bar in bars(rows, measured=False)} == {"not measured"}


def test_gpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    counts = importlib.import_module("gpu_counts")
    host = [
        (counts.MARK, 0, 100),
        ("cudaLaunchKernel", 10, 12),
        ("cudaGraphLaunch", 20, 25),
        ("cudaMemcpyAsync", 30, 31),
        ("cudaStreamSynchronize", 31, 90),
        ("cudaDeviceSynchronize", 101, 200),  # of the profiler
    ]
    ran = [(counts.MARK, 0, 99), ("kernel", 20, 50), ("kernel", 40, 60), ("Memcpy DtoH", 70, 80)]
    events = [[counts.Event(*each) for each in those] for those in (host, ran)]
    expected = {"launches": 2, "graphs": 1, "copies": 1, "waits": 1, "kernels": 2}
    assert counts.on_cuda(*events) == {**expected, "busy_ms": 50 / 1e6}


def test_head_forms(folder: Path, tmp_path: Path) -> None:
    with gzip.open(tmp_path / "train.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": WORDS[i * 40 :]}) + "\n" for i in range(8))
    few = ("--texts", "4", "--held-out", "2", "--tokens", "8", "--steps", "2")
    forms = ("--forms", "medusa", "dflash")
    printed = run("head_forms.py", "--data", tmp_path, "--model", folder, *forms, *few)
    rows = [json.loads(line) for line in printed.splitlines()]
    assert [row["form"] for row in rows] == ["medusa", "dflash"]
    assert all(row["tokens_per_forward"] >= 1 and len(row["by_depth"]) == 4 for row in rows)


def test_scripts_import_what_the_library_has() -> None:
    lacking = []
    for path in SCRIPTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ragspec"):
                module = importlib.import_module(str(node.module))
                for name in (each.name for each in node.names):
                    place = f"{node.module}.{name}"
                    below = hasattr(module, "__path__") and importlib.util.find_spec(place)
                    if not (hasattr(module, name) or below):
                        lacking.append(f"{path.name}: {place}")
    assert not lacking
