"""Texts of ours, of llama.cpp and of OpenVINO on a CPU, taking turns: ms of a token.

Processor time with one thread; with several the clock's, as threads that wait busily take time too.

    OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/rivals.py [--prompts 4] [--threads 1]
        [--turns spec_bench/question_dev.jsonl]

llama.cpp and OpenVINO GenAI run the same weights as Q8_0 by the packages xllamacpp and
openvino-genai, which are found or left out. Ours runs them as int8. Texts have 64 tokens, greedy,
and each prompt is cached before the clock starts; the last group has 512 tokens of documents as
prompts. The texts may part, as inputs are rounded in other ways. At last prompts of some lengths
are read, in milliseconds of a token. `--turns` takes Spec-Bench's six categories instead;
its last line has the means and the least of llama.cpp's time over that of `auto`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from budget import items_of
from runtimes import GROUPS, show

from ragspec.engine.engine import Engine
from ragspec.models.load import load_model
from ragspec.pipelines.bench.prompts import BenchItem, bundled_items, read_turns, turn_ids
from ragspec.sampling.settings import Sampling

NEW = 64
WARM = 1  # tokens of the text that reads the prompt
READ = (400, 1900, 4000)  # tokens of prompts that are read
AFTER = 512  # tokens of the prompts of the last group
# Of Spec-Bench; the categories of MT-Bench are one.
CATEGORIES = ("translation", "summarization", "qa", "math_reasoning", "rag")
Write = Callable[[BenchItem, int], int]


def write_q8_0(model: Any, tokenizer: Any, path: Path) -> None:
    """Write a model of Llama's architecture as a GGUF file of Q8_0 blocks."""
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType

    from tests.support.toy_gguf import CONTROL, NORMAL, add_llama

    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = tokenizer.convert_ids_to_tokens(range(model.config.vocab_size))
    special = {each["content"] for each in vocabulary["added_tokens"]}
    merges = vocabulary["model"]["merges"]
    writer = GGUFWriter(str(path), "llama")
    writer.add_file_type(int(LlamaFileType.MOSTLY_Q8_0))
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in special else NORMAL for token in tokens])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(int(tokenizer.bos_token_id))
    writer.add_eos_token_id(int(tokenizer.eos_token_id))
    add_llama(writer, model, GGMLQuantizationType.Q8_0)


def served(file: Path, threads: int) -> Any:
    """Return llama.cpp's server over a GGUF file, in this process."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = str(file)
    settings.n_ctx, settings.n_parallel, settings.verbosity = 4608, 1, -1
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
    return xllamacpp.Server(settings)


def llama_cpp(file: Path, threads: int) -> Write:
    """Return a function by which llama.cpp writes so many tokens after a prompt."""
    server = served(file, threads)

    def write(item: BenchItem, count: int) -> int:
        body = {
            "prompt": list(item.prompt),
            "n_predict": count,
            "temperature": item.temperature,
            "seed": 0,
            "ignore_eos": True,
            "cache_prompt": True,
        }
        reply = server.handle_completions(body)
        reply = json.loads(reply) if isinstance(reply, str | bytes) else reply
        return int(reply["timings"]["predicted_n"])

    return write


def openvino(file: Path, threads: int) -> Write:
    """Return a function by which OpenVINO GenAI writes so many tokens after a prompt."""
    import openvino_genai
    from openvino import Tensor

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching, scheduler.cache_size = True, 1  # GB
    options = {"scheduler_config": scheduler, "INFERENCE_NUM_THREADS": threads}
    pipe = openvino_genai.LLMPipeline(str(file), "CPU", **options)

    def write(item: BenchItem, count: int) -> int:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = count, True
        if item.temperature:
            config.do_sample, config.temperature = True, item.temperature
        return len(pipe.generate(Tensor(torch.tensor([item.prompt]).numpy()), config).tokens[0])

    return write


PEERS = {"xllamacpp": ("llama.cpp Q8_0", llama_cpp), "openvino_genai": ("OpenVINO Q8_0", openvino)}


def ours(engine: Engine) -> Write:
    """Return a function by which an engine writes so many tokens after a prompt."""

    def write(item: BenchItem, count: int) -> int:
        out = engine.generate(
            list(item.prompt),
            Sampling(temperature=item.temperature, seed=0),
            max_new_tokens=count,
            ignore_eos=True,
            spans=item.spans or None,
            texts=item.texts or None,
        )
        return len(out.tokens)

    return write


def reading(
    writers: dict[str, Write], rounds: int, clock: Callable[[], float]
) -> dict[str, dict[str, float]]:
    """Return the milliseconds of a token of prompts, by their lengths; no two are alike."""
    times: dict[str, dict[str, list[float]]] = {name: {} for name in writers}
    generator = torch.Generator().manual_seed(0)
    for length in READ * rounds:
        for name, write in writers.items():
            text = torch.randint(1000, 40_000, (length,), generator=generator).tolist()
            start = clock()
            write(BenchItem("reading", "", tuple(text), 1), 1)
            each = 1000.0 * (clock() - start) / length
            times[name].setdefault(f"{length}", []).append(each)
    return {name: {n: median(t) for n, t in each.items()} for name, each in times.items()}


def own_items(engine: Engine, count: int) -> list[BenchItem]:
    """Return items over documents, of a chat, and where nothing is copied."""
    items = items_of(engine, GROUPS, count)
    text = [token for item in bundled_items(engine) for token in item.prompt]
    for start in range(0, AFTER * count, AFTER):
        items.append(BenchItem("", f"after {AFTER}", tuple(text[start : start + AFTER]), 1))
    return items


def spec_bench_items(file: Path, engine: Engine, count: int) -> list[BenchItem]:
    """Return the first turns of a Spec-Bench file, spread over each category."""
    groups: dict[str, list[BenchItem]] = {}
    for (category, name), text in read_turns(file).items():
        group = category if category in CATEGORIES else "mt_bench"
        item = BenchItem(name, group, tuple(turn_ids(engine.tokenizer, text)), NEW)
        groups.setdefault(group, []).append(item)
    return [each for group in groups.values() for each in group[:: -(-len(group) // count)]]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=4, help="prompts of a group")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=Path, help="prompts of Spec-Bench")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    engine = Engine.from_pretrained(options.model, dtype="int8", device="cpu")
    plain = Engine(engine.target, engine.tokenizer, None)
    writers = {"ragspec, plain": ours(plain), "ragspec, auto": ours(engine)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "q8_0.gguf")
        write_q8_0(*load_model(options.model, "cpu", "float32"), file)
        for package, (name, peer) in PEERS.items():
            if find_spec(package) is None:
                print(f"{name} is left out: {package} is not installed", flush=True)
            else:
                writers[name] = peer(file, options.threads)
        times: dict[str, dict[str, list[float]]] = {name: {} for name in writers}
        if options.turns is None:
            items = own_items(engine, options.prompts)
        else:
            items = spec_bench_items(options.turns, engine, options.prompts)
        for number, item in enumerate(items):
            names = list(writers)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                writers[name](item, WARM)
                start = clock()
                count = writers[name](item, NEW)
                each = 1000.0 * (clock() - start) / count
                times[name].setdefault(item.category, []).append(each)
    table = {name: {g: median(t) for g, t in groups.items()} for name, groups in times.items()}
    show(table)
    if options.turns is None:
        show(reading({name: writers[name] for name in writers if "auto" not in name}, 3, clock))
    elif (peer := PEERS["xllamacpp"][0]) in table:
        ratios = [table[peer][group] / time for group, time in table["ragspec, auto"].items()]
        print(f"{peer} over auto: mean {mean(ratios):.2f}, least {min(ratios):.2f}")
    if options.json:
        options.json.write_text(json.dumps(times, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
