"""Wrong input that needs no model is refused before torch is imported, within two seconds."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ragspec.storage.store import publish
from tests.support import tiny

ASK = "ask why --docs docs"
ITERATIVE = "ask-iterative why --docs docs"
TILES = "serve --images tiles"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("early")
    (folder / "docs").mkdir()
    (folder / "docs" / "a.txt").write_text("The cat sleeps.")
    (folder / "empty").mkdir()
    (folder / "bad.jinja").write_text("{{ broken")
    (folder / "broken.gguf").write_bytes(bytes(4))
    for name in ("empty.jsonl", "empty.txt", "bad/a.pdf", "a+b/a.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("")
    odd = '{"model_type": "llamagen", "num_classes": "x"}'
    bare = '{"model_type": "llama"}'
    for name, config in {"nameless": "{}", "bare": bare, "torn": "{", "odd": odd}.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(config)  # no weights
    shutil.copytree(folder / "bare", folder / "cut")
    (folder / "cut" / "model.safetensors").write_bytes(bytes(4))
    tiny.save(folder / "other")
    (folder / "bad.npz").write_bytes(bytes(4))
    (folder / "rows.jsonl").write_text('{"text": "a", "question": "b", "answer": "c"}\n{"text": 1}')
    publish(folder / "an.index", "passages", lambda folder: None)
    publish(folder / "a.store", "corpus", lambda folder: None)
    (folder / "q.jsonl").write_text('{"question": "Who sleeps?"}')
    (folder / "mine.html").write_text("<!doctype html><title>mine</title>")
    (folder / "odd.jsonl").write_text('{"a": "x", "c": "y"}')
    return folder


CASES = [
    ("ask why", 2, "Expected --docs, got none"),
    ("ask why --docs none", 7, "none is missing"),
    ("ask why --docs ''", 2, "variable of the shell unset?"),
    ("index build '' --out new", 2, "variable of the shell unset?"),
    ("store build '' --out new", 7, "an empty path is missing"),
    ("train-head --data= --out new", 2, "variable of the shell unset?"),
    ("ask - --docs docs", 2, "The question is empty or no text ('-')"),
    (f"{ASK} --model nosuch", 5, "no model 'nosuch'"),
    (f"{ASK} --model broken.gguf", 4, "does not begin with GGUF"),
    (f"{ASK} --draft-model nosuch", 5, "no model 'nosuch'"),
    (f"{ASK} --drafter contxt", 2, "Did you mean 'context'"),
    (f"{ASK} --budget many", 2, "got budget 'many'"),
    (f"{ASK} --store empty", 8, "holds no store"),
    (f"{ASK} -s history=empty", 8, "holds no store"),
    (f"{ASK} --store an.index", 8, "holds 'passages', expected 'corpus'"),
    ("ask why --docs a.store", 8, "holds 'corpus', expected 'passages'"),
    (f"{ASK} --drafter none,context", 2, "expected none by itself"),
    (f"{ASK} --drafter ,", 2, "got drafter ','; expected names"),
    (f"{ASK} --drafter nameless", 5, "nameless holds no draft head"),
    (f"{ASK} --drafter head", 2, "Known: auto, context, fused, hierarchy, lookup, match, model,"),
    (f"{ASK} --drafter model", 2, "model got no draft model; expected one"),
    (f"{ASK} --drafter rest", 2, "no store; expected one. Give it with --store or --set history=."),
    ("ask why --docs empty", 7, "empty holds no usable text (it holds no file)"),
    ("ask why --docs empty.txt", 7, "empty.txt holds no text"),
    ("ask why --docs bad/a.pdf", 7, "a.pdf is no PDF"),
    ("bench answers q.jsonl --docs bad", 7, "bad holds no usable text; the first of 1 skipped"),
    (f"{ASK} -s embedder=nosuch", 5, "no model 'nosuch'"),
    (f"{ASK} -s prediction=@none", 2, "the prediction none cannot be read"),
    (f"{ASK} -s prediction=x --drafter none", 2, "beside a prediction, got --drafter none"),
    (f"{ASK} -s top-p", 2, "expected NAME=VALUE with one of adapter, "),
    (f"{ASK} -s tenant=x", 2, "got tenant=x and no store"),
    (f"{ASK} -s adapter=empty", 5, "no adapter in empty"),
    (f"{ASK} -s dtype=int3", 2, "should be 'auto', 'float32'"),
    (f"{ASK} -s static=graf", 2, "should be 'auto', 'off', 'eager'"),
    (f"{ASK} -s prompt=bad.jinja", 2, "is no Jinja, line 1: unexpected end of template, "),
    (f"{ASK} -s prompt=empty.jsonl", 2, "the prompt template empty.jsonl is empty"),
    (f"{ASK} -s prompt=anser", 2, "Did you mean 'answer'"),
    (f"{ASK} -s embedder=starter", 4, "starter is a causal language model"),
    (f"{ASK} -s device=bogus", 2, "device 'bogus' is unknown to torch"),
    (f"{ASK} -s device-map=best", 2, "device 'best' is unknown to torch"),
    (f"{ASK} -s device=cpu -s static=graph", 2, "static='graph' for a model on cpu"),
    (f"{ASK} -s runtime=onnx -s dtype=float16", 4, "its dtype is float16"),
    (f"{ASK} --model nameless", 4, "no model_type in it"),
    (f"{ASK} --model bare", 5, "bare lacks *.safetensors"),
    (f"{ASK} --model cut", 4, "model.safetensors is damaged"),
    (f"{ASK} --draft-model other", 6, "tokenizer differs from the target's in 3 of 97"),
    ("bench text --draft-model other", 6, "tokenizer differs from the target's in 3 of 97"),
    (f"{ASK} --draft-model starter-embedder", 4, "embeds text; expected a model that writes"),
    (f"{ASK} --drafter cut", 4, "model.safetensors is damaged"),
    (f"{ASK} --drafter recycling --store a.store", 2, "recycling does not draft from stores"),
    (f"{ASK} --drafter none --store a.store", 2, "got a store and --drafter none"),
    (f"{ASK} --store a.store -s tenant=request", 2, "scope 'request' is text that stays"),
    (f"{ASK} -t warm", 2, "got 'warm'"),
    (f"{ASK} -t -3", 2, "temperature is -3"),
    (f"{ASK} --trace no/t.jsonl", 2, "there is no folder no"),
    (f"{ITERATIVE} -s search=any", 2, "should be 'dense', 'sparse' or 'fused'"),
    (f"{ITERATIVE} -s speculate=much", 2, "got speculate=much"),
    (f"{ITERATIVE} -s top-passages=3", 2, "got --set top-passages=3"),
    (f"{ITERATIVE} -s rounds=2 --stride 7", 2, "got rounds beside --stride"),
    ("ask-long why", 2, "Expected --doc FILE"),
    ("ask-long why --save-cache new", 2, "got new, which holds none"),
    ("ask-long why --doc none.txt", 7, "none.txt is missing"),
    ("ask-long why --doc docs/a.txt --steer -1", 2, "got -1"),
    ("ask-long why --doc docs/a.txt -s token-range=five", 2, "Expected token-range=FROM:TO"),
    ("ask-long why --doc docs/a.txt -s token-range=7:7", 2, "Expected token-range=FROM:TO"),
    ("ask-long why --doc docs/a.txt -s prompt=anser", 2, "Did you mean 'answer'"),
    ("ask-long why --doc empty.jsonl", 7, "empty.jsonl holds no"),
    ("ask-long why --doc docs", 2, "Invalid value for '--doc'"),
    ("ask-long why --doc docs/a.txt --save-cache docs", 8, "docs holds other files"),
    ("ask-long why --doc docs/a.txt --save-cache q.jsonl", 8, "q.jsonl is a file"),
    ("ask-long why --save-cache an.index", 8, "expected 'saved document'"),
    ("generate ''", 2, "Expected a prompt"),
    ("generate a --stop ''", 2, "Expected a stop string"),
    ("generate a --drafter ./no/head", 5, "./no/head is no folder; expected that of a head"),
    ("generate a -t model --seed 3 -s top-p=0.5", 2, "got top-p or top-k beside it"),
    ("generate a -s knn=4", 2, "Expected --datastore"),
    ("generate a --datastore empty", 8, "holds no store"),
    ("generate a --datastore a.store", 8, "expected 'datastore'"),
    ("generate a --chat", 4, "without a chat template"),
    ("generate a -s system=Short.", 2, "Expected --chat beside system"),
    ("chat --model starter", 4, "without a chat template"),
    ("chat ' ' --model starter", 2, "The question is empty or no text (' ')"),
    ("draw star --model emojy", 5, "Did you mean 'emoji'"),
    ("draw star -t nan", 2, "Invalid value for '--temperature'"),
    ("draw star --rule lantrn", 2, "Did you mean 'lantern'"),
    ("draw star --drafter jacoby", 2, "Did you mean 'jacobi'"),
    ("draw star --drafter docs", 5, "no draft model at docs"),
    ("draw star --drafter cut", 4, "model.safetensors is damaged"),
    ("draw star --rule lantern -s lam=3", 2, "rule 'lantern' has no lam; it takes delta, "),
    ("draw star --rule lantern -s delta=1", 2, "got delta=1.0; expected a probability mass"),
    ("draw star --rule near", 2, "unknown rule 'near'"),
    ("draw star --drafter a+b", 5, "no draft model at a+b: it holds no config.json"),
    ("draw star --model latent-emoji --rule lantern", 2, "unknown latent rule 'lantern'"),
    ("draw star --model latent-emoji -s r=0.1", 2, "rule 'aligned' has no r"),
    ("draw star --model latent-emoji -s steps=0", 2, "got steps=0; expected a whole number"),
    ("draw star --guidance inf", 2, "got guidance_scale=inf; expected a finite number of 0 or"),
    ("draw star --drafter jacobi+model --model latent-emoji", 2, "got 2 drafters of latents"),
    ("draw star --drafter head --model latent-emoji", 2, "got a draft head for latents"),
    ("draw star --drafter jacobi --rule gsd -s tv_budget=1", 2, "deterministic drafts are needed"),
    ("draw star -s device=bogus", 2, "device 'bogus' is unknown to torch"),
    ("draw star -s device=", 2, "device '' is unknown to torch"),
    ("draw star -s dtype=int8", 2, "dtype 'int8' is unknown"),
    ("draw --class 1 --model odd", 4, "expected a number as num_classes"),
    ("draw star --model torn", 4, "torn/config.json cannot be used (Expecting property"),
    ("draw --class 1 --model broken.gguf", 5, "Open a published file in Python"),
    ("bench image --model broken.gguf", 5, "Open a published file in Python"),
    ("serve --images broken.gguf", 5, "Open a published file in Python"),
    ("train-head --data bad.npz --out h --model bare", 4, "a LlamaGen model, got bare, a 'llama'"),
    ("draw star --model tiles", 2, "Expected --class, got the prompt 'star'"),
    ("draw --class 3 --model emoji", 2, "got --class 3: emoji reads prompts"),
    ("draw --class 99", 2, "got class=99; expected a whole number from 0 to 31"),
    ("bench text --variants hf-lookup@3,context+nope", 2, "unknown drafter 'nope'"),
    ("bench text --model nosuch", 5, "no model 'nosuch'"),
    ("bench text --data none.jsonl", 7, "none.jsonl is missing"),
    ("bench text --variants context+plain", 2, "unknown drafter 'plain'"),
    ("bench text --variants rest", 2, "expected one. Give it with --store or --set history=."),
    ("bench text --items 0", 2, "Invalid value for '--items'"),
    ("bench text --repeats 0", 2, "Invalid value for '--repeats'"),
    ("bench text --store docs", 8, "holds no store"),
    ("bench text --variants ''", 2, "Expected --variants plain,auto or others, got none"),
    ("bench text --variants plain,context --store a.store", 2, "does not draft from stores"),
    ("bench text --variants hf-lookup@3 -s history=a.store", 2, "plain does not draft from"),
    ("bench text --data rows.jsonl", 7, "rows.jsonl, line 1: cannot be read (KeyError('turns'))"),
    ("bench answers rows.jsonl --docs docs", 7, "'answer' looks like the answers"),
    ("bench image --variants lantern@1.2.3", 2, "got 'lantern@1.2.3'"),
    ("bench image --variants exact:jacobi+hed", 2, "Did you mean 'head'"),
    ("bench image --variants exact@0.3", 2, "Expected 'exact' without a value"),
    ("bench image --model latent-tiles --variants horizon@0", 2, "got s=0"),
    ("bench image --model latent-tiles --variants horizon@2.7", 2, "got s=2.7"),
    ("bench image --model latent-tiles --variants fewer@8.9", 2, "Expected fewer@N"),
    ("bench text --json docs", 2, "docs cannot be written: docs is a folder"),
    ("draw --model emoji sun --json -o x.png", 2, "-o cannot be written: it looks like an option"),
    ("bench image -s dtype=int8", 2, "should be 'auto', 'float32'"),
    ("bench image --guidance inf", 2, "got guidance_scale=inf"),
    ("bench image --temperature nan", 2, "got temperature=nan"),
    ("bench image --model tile", 5, "Did you mean 'tiles'"),
    ("bench image --variants lantrn@0.3:model", 2, "Did you mean 'lantern'"),
    ("draw", 2, "Expected a prompt or --class, got neither"),
    ("draw cat --class 1 --model nameless", 2, "Expected a prompt or --class, got both"),
    ("draw '' --model emoji", 2, "got the prompt ''"),
    ("draw --class violet", 2, "got the class 'violet'; expected one of dngn/altars, "),
    ("draw --class 1 --n 2 --seed 9223372036854775807", 2, "808 to 9223372036854775806."),
    ("generate a --model starter -t 1 --seed 9223372036854775808", 2, "expected a whole number"),
    ("draw --class 1 --drafter ''", 2, "Expected drafter auto"),
    ("draw --class 1 --drafter starter+", 2, "got 'starter+'"),
    ("draw --class 1 --drafter none+starter", 2, "none by itself"),
    ("draw --class 1 --rule exact -s delta=0.1", 2, "rule 'exact' has no delta"),
    ("draw --class 1 --rule lantern -s delta", 2, "Expected --set NAME=VALUE"),
    ("draw --class 1 --rule lantern -s neighbours=1.5", 2, "Give a whole number"),
    ("draw --class 1 -s iterations=4", 2, "rule 'exact' has no iterations"),
    ("draw --class 1 --n 0", 2, "Invalid value for '--n'"),
    ("draw star --family junus", 2, "Did you mean 'janus'"),
    ("draw star --budget many", 2, "got budget 'many'"),
    ("serve --docs none", 7, "none is missing"),
    ("serve --store answers", 2, "expected NAME=FOLDER"),
    ("serve --store =a.store", 2, "expected NAME=FOLDER"),
    ("serve --store a=", 2, "expected NAME=FOLDER"),
    ("serve --store a=a.store --store a=b", 2, "expected NAME=FOLDER, each name once"),
    ("serve --store answers=empty", 8, "holds no store"),
    ("serve --store answers=an.index", 8, "expected 'corpus'"),
    (f"{TILES} --images tiles", 2, "got --images tiles, tiles; expected each name once"),
    ("serve --images tile", 5, "Did you mean 'tiles'"),
    ("serve --drafter rest", 2, "no store; expected one. Give it with --store NAME=FOLDER."),
    ("serve --drafter rapid", 2, "rapid got no draft model"),
    ("serve --drafter rapid --draft-model starter", 2, "requests have one prompt"),
    ("serve --model nowhere-at-all", 5, "nowhere-at-all"),
    ("serve --host 0.0.0.0", 2, "--key"),
    ("serve --host 192.0.2.1 --key a", 2, "cannot listen on 192.0.2.1:8000"),
    ("serve -s kv-memory=0", 2, "should be greater than or equal to 1"),
    ("serve --key @none", 2, "the file of API keys none cannot be read"),
    ("serve -s max-model-len=0", 2, "should be greater than or equal to 1"),
    ("report docs/a.txt --out no/page.html", 2, "there is no folder no"),
    ("index build docs --out empty --dense near", 2, "Invalid value for '--dense'"),
    ("index build docs --out empty --embedder nosuch", 5, "no model 'nosuch'"),
    ("index build docs --out docs", 8, "docs holds other files (a.txt) and no store"),
    ("index build docs --out an.index", 2, "puts the new one in its place; `ragspec index add"),
    ("index build docs --out a.store --replace", 8, "expected 'passages'"),
    ("index add an.index none", 7, "none is missing"),
    ("index refresh empty", 8, "holds no store"),
    ("index remove a.store a.txt", 8, "expected 'passages'"),
    ("index info a.store", 8, "expected 'passages'"),
    ("store info an.index", 8, "expected 'corpus'"),
    ("store build docs --out an.index --replace", 8, "expected 'corpus'"),
    ("store info none.store", 8, "none.store holds no store"),
    ("store verify none.store", 8, "none.store holds no store"),
    ("store build docs --out docs", 8, "docs holds other files (a.txt) and no store"),
    ("store build docs --out q.jsonl", 8, "q.jsonl is a file"),
    ("store build docs --out s.store --model nosuch", 5, "no model 'nosuch'"),
    ("store build docs --out s.store --max-tokens 0", 2, "should be greater than or equal to 1"),
    ("store build docs --out s.store --max-tokens many", 2, "should be a valid integer"),
    ("store build hf:no/where --out s.store", 2, "hf:no/where is no data set that loads"),
    ("store build odd.jsonl --out s.store -s field=b", 2, "no column 'b'; it has a, c"),
    ("store from-answers odd.jsonl --out s.store", 2, "no column of a usual name"),
    ("store build docs --out s.store -s split=test", 2, "docs has no splits"),
    ("datastore build docs --out a.store", 8, "expected 'datastore'"),
    ("datastore build docs --out d.knn --max-tokens 0", 2, "greater than or equal to 1"),
    ("datastore info a.store", 8, "expected 'datastore'"),
    ("train-head --data docs --out h -s form=eagle2", 2, "should be 'eagle1', 'eagle3'"),
    ("train-head --data docs --out h -s slots=3", 2, "got slots=3 for a head of eagle1; expected"),
    ("train-head --data docs --out h --model tiles", 5, "It is an image model: use `ragspec draw`"),
    ("train-head --data bad.npz --out h", 5, "starter is a model of text, which learns from"),
    ("train-head --data bad.npz --out h --model tiles -s dtype=int8", 2, "int8 for pictures"),
    ("train-head --data docs --out h --start docs", 5, "docs holds no draft head"),
    ("index build empty --out i.idx", 7, "empty holds no usable text"),
    ("models get smolm2", 2, "Did you mean 'smollm2'"),
    ("models remove nosuch", 2, "unknown model to remove 'nosuch'"),
    ("train-head --data docs --out h -s vocabulary=8193", 2, "expected 1 to 8192, the model's"),
    ("index build none --out i.idx", 7, "none is missing"),
    ("store build none.txt --out s.store", 7, "none.txt is missing"),
    ("store from-answers none.jsonl --out s.store", 7, "none.jsonl is missing"),
    ("datastore build none.txt --out d.knn", 7, "none.txt is missing"),
    ("train-head --data none --out h", 7, "none is missing"),
    ("train-head --data docs --out h --model nosuch", 5, "no model 'nosuch'"),
    ("train-head --data docs --out docs", 2, "docs holds other files"),
    ("train-head --data docs --out q.jsonl", 2, "may write, got q.jsonl"),
    ("train-head --data docs --out h --resume", 8, "Expected an interrupted training in h"),
    ("train-head --data docs --out h --minutes 0", 2, "--minutes is 0; expected a number above 0"),
    ("train-head --data docs --out h -s rate=nan", 2, "rate is nan; expected a number above 0"),
    ("train-head --data rows.jsonl --out h", 2, "rows.jsonl, line 2 holds int"),
    ("train-head --data bad.npz --out h --model tiles", 2, "bad.npz cannot be read"),
    ("store build rows.jsonl --out s.store", 2, "rows.jsonl, line 2 holds int"),
    ("store from-answers empty.jsonl --out s.store", 7, "empty.jsonl holds no rows"),
    ("report none.jsonl", 2, "the trace none.jsonl cannot be read"),
    ("report docs/a.txt", 2, "line 1 is not a JSON object"),
    (f"{ASK} --trace docs/a.txt", 2, "docs/a.txt holds something else"),
    ("generate a --trace q.jsonl", 2, "q.jsonl holds something else"),
    ("report q.jsonl -o q.jsonl", 2, "q.jsonl holds something else"),
    ("report q.jsonl -o mine.html", 2, "mine.html holds something else"),
    ("draw star --json docs/a.txt", 2, "docs/a.txt holds something else"),
    ("draw star --out docs --json docs/a.txt", 2, "docs/a.txt holds something else"),
    ("bench answers q.jsonl --docs docs --json q.jsonl", 2, "q.jsonl holds something else"),
    ("bench answers q.jsonl --docs docs --html docs", 2, "docs is a folder"),
    ("bench answers q.jsonl --docs docs --html mine.html", 2, "mine.html holds something else"),
]
CASES += [("nonsense", 2, "No such command"), ("generate a --wrong", 2, "No such option: --wrong")]
NOTES = ("", *(f"{note} ... " for note in ("starting", "hashing", "reading the trace")))
NOTES += ("reading the documents ... ",)
BEGINS = (*(f"{note}error: " for note in NOTES), "Usage: ")

SCRIPT = """
import contextlib, io, shlex, sys

sys.modules["torch"] = sys.modules["transformers"] = None
from ragspec.pipelines.cli.app import main

for words in sys.stdin.read().splitlines():
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        try:
            code = main(shlex.split(words))
        except ModuleNotFoundError as error:
            code = error
    print(code, " ".join(err.getvalue().split()))
"""


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_wrong_input_is_named_before_torch_is_imported_and_nothing_is_written(folder: Path) -> None:
    before = contents(folder)
    command, lines = [sys.executable, "-c", SCRIPT], "\n".join(words for words, _, _ in CASES)
    done = subprocess.run(
        command, input=lines, capture_output=True, encoding="utf-8", cwd=folder, check=True
    )
    wrong = [
        (words, row)
        for (words, exit_code, message), row in zip(CASES, done.stdout.splitlines(), strict=True)
        if not (row.startswith(tuple(f"{exit_code} {each}" for each in BEGINS)) and message in row)
    ]
    assert wrong == []
    assert contents(folder) == before
