"""Quantized models as graphs in the cache folder, which open without transformers' modules.

A folder has the graphs, their weights, which the runtime maps, and a record: what the probe
decided, the configuration, the cost of forwards, and the SHA-256 of each file and of the record
itself. Its name has a key of all on which the bits depend: the model's files (by size and times),
this format, the packages and their settings, the processor and the threads. A damaged folder is
made anew. A model has few graphs: the one that was not used for longest goes.
"""

import contextlib
import glob
import hashlib
import json
import os
import platform
import shutil
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ragspec.budget.forward_cost import SIZES, ForwardCost
from ragspec.errors import ModelError
from ragspec.models.block_linear import BlockEmbedding, BlockLinear, count_weights
from ragspec.models.device import pick_device, thread_count
from ragspec.models.gguf import converted_folder, discard, file_state, fill, shortened
from ragspec.models.load import LOCAL, load_model, read_tokenizer
from ragspec.models.onnx_session import SETTINGS, Session, missing_package, onnx_runtime
from ragspec.models.quantized import INT8
from ragspec.models.resolve import is_model, resolve_model
from ragspec.models.supported import cache_argument
from ragspec.storage.filesystem import cache_directory
from ragspec.storage.manifest import sha256_file
from ragspec.types import Cache, PreTrainedModel, Tokenizer
from ragspec.verification.causal import CausalTarget
from ragspec.verification.onnx.bits import Rows, Views, batches_agree
from ragspec.verification.onnx.packed import store_packed, store_weights
from ragspec.verification.onnx.record import RECORD, read_record
from ragspec.verification.onnx.target import FOLD_TO, POSITIONS, SEQUENCES, GraphRunner, OnnxTarget

VERSION = 13
GRAPH, BATCH = "graph.onnx", "batch.onnx"  # of one sequence and of several
STEP, STEP_BATCH = "step.onnx", "step-batch.onnx"  # of few positions, if they can be folded
WEIGHTS = "weights.bin"  # of all
TENSORS = "tensors.safetensors"  # those that are read outside of the graph
FREQUENCIES = "frequencies"  # what the names of those of `OnnxTarget.frequencies` begin with
HEAD = frozenset({"codes", "scales", "bias", "factors"})  # those of its output head
STEP_AFTER = 75_000  # slots that forwards read for which `STEP` is faster, until it is opened
STEP_FROM = 512  # slots in use for each position of one sequence, from which on it is faster
ROUNDS = 10  # of timed forwards, whose costs stay
MOST = 4  # graphs of one model: of other threads or packages


@dataclass(frozen=True, slots=True)
class CachedGraph:
    """The graph of a model in the cache folder, there or not.

    Attributes:
        source: The folder of the model.
        files: Its files, see `file_state`.
        folder: The folder of the graph.
        weights: What its weights are stored in, "int8" or "int4".
    """

    source: Path
    files: tuple[tuple[str, int, int, int], ...]
    folder: Path
    weights: str

    def open(self) -> tuple[CausalTarget, Tokenizer] | None:
        """Return (target, tokenizer); None if the graph is not there, or was damaged."""
        if not self.folder.is_dir():
            return None
        with contextlib.suppress(OSError):
            os.utime(self.folder / RECORD)  # when it was used
        try:
            record = read_record(self.folder)
            for name, digest in record["files"].items():
                if sha256_file(self.folder / name) != digest:
                    raise ValueError(f"{name} has changed")
            target = CachedTarget(self.folder, record, self._load)
        except Exception as error:  # the runtime has no tree of errors
            discard(self.folder, error)
            return None
        if record["plain_tokenizer"]:  # AutoTokenizer scans the folders of all models
            from transformers import PreTrainedTokenizerFast

            return target, PreTrainedTokenizerFast.from_pretrained(self.source, **LOCAL)
        return target, read_tokenizer(str(self.source), self.source, LOCAL)

    def _load(self) -> PreTrainedModel:
        """Return the model; raise ModelError if it is not the one that the graph was made of."""
        if _files(self.source) != self.files:
            raise ModelError(
                f"the model in {self.source} has changed since it was opened, or was removed; "
                "expected the one whose text the graph writes. Open it again."
            )
        return load_model(self.source, "cpu", self.weights)[0]

    def keep(self, target: OnnxTarget, tokenizer: object) -> None:
        """Write the graph of a target, unless the disk is full or read-only."""
        if not isinstance(target.output_head, BlockLinear):
            return
        target.known_cost = ForwardCost.probe(target.time_forward, target.max_length, rounds=ROUNDS)
        size = 5 * sum(weight.nbytes for weight in target.model.parameters())  # packed and copied
        fill(self.folder, size, lambda whole: _write(whole, target, tokenizer))
        with contextlib.suppress(OSError):
            model = glob.escape(self.folder.name.rpartition("-")[0])
            records = self.folder.parent.glob(f"{model}-*/{RECORD}")
            for record in sorted(records, key=lambda path: path.stat().st_mtime)[:-MOST]:
                shutil.rmtree(record.parent)


def cached_graph(name: str | Path, device: str | torch.device, dtype: str) -> CachedGraph | None:
    """Return the graph of a model as the cache has or will have it; None on another device.

    Args:
        dtype: "int8", "int4", or "auto" if the model's size decides.

    Raises:
        MissingModelError, InputError: As for `load_model`.
    """
    source = resolve_model(name)
    folder = source.folder
    if source.file is not None:
        folder = converted_folder(folder / source.file, torch.float32)
    if pick_device(device).type != "cpu" or missing_package() or not is_model(folder):
        return None
    files, cpu = _files(folder), Path("/proc/cpuinfo")
    flags = cpu.read_text("utf-8").partition("flags")[2].partition("\n")[0] if cpu.exists() else ""
    packages = onnx_runtime().__version__, torch.__version__, version("transformers")
    machine = platform.machine(), platform.processor(), flags, thread_count()
    identity = repr((files, VERSION, dtype, packages, *map(os.environ.get, SETTINGS), machine))
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    place = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]  # names may be alike
    weights = INT8 if dtype == "auto" else dtype
    name = f"{shortened(folder.name, 120)}-{weights}-{place}-{key}"  # all of a converted one's
    return CachedGraph(folder, files, cache_directory() / "models" / name, weights)


def _files(folder: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Return the files of a model, also in folders that its index may name; see `file_state`."""
    kinds = "*.safetensors", "*.bin", "*.json"
    paths = sorted(path for each in kinds for path in folder.rglob(each))
    return tuple(file_state(path) for path in paths if path.is_file())


def _write(folder: Path, target: OnnxTarget, tokenizer: object) -> None:
    """Write graph, weights and record of a target to a folder."""
    from safetensors.numpy import save_file
    from transformers import PreTrainedTokenizerFast

    from ragspec.verification.onnx.graph import build_graph, in_onnx

    model, graph = target.model, build_graph(target.model, 1, 0, False)
    weights = graph.floating()
    places = store_weights(folder / WEIGHTS, weights)
    (folder / GRAPH).write_bytes(in_onnx(graph, model, places))
    store_packed(folder / GRAPH, folder / WEIGHTS, places)
    (folder / GRAPH).write_bytes(in_onnx(graph, model, places))
    for name, plain, folded in ((BATCH, SEQUENCES, 0), (STEP, 0, 1), (STEP_BATCH, 0, SEQUENCES)):
        graph = build_graph(model, plain, folded, False)
        if graph.plain or graph.folded:
            (folder / name).write_bytes(in_onnx(graph, model, places))
    names = {"embedding", *(f"logits.{part}" for part in HEAD)} & weights.keys()
    read = {name: weights[name].numpy() for name in names}
    turns = {f"{FREQUENCIES}{end}": each.numpy() for end, each in target.frequencies.items()}
    save_file(read | turns, folder / TENSORS)
    generation, cost = getattr(model, "generation_config", None), target.known_cost
    record = {
        "files": {path.name: sha256_file(path) for path in sorted(folder.iterdir())},
        "model_type": model.config.model_type,
        "config": model.config.to_dict(),
        "generation_config": None if generation is None else generation.to_dict(),
        "factor": getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0),
        "weights": target.weights,
        "width": model.model.layers[0].self_attn.head_dim,
        "parameters": count_weights(model),
        "same_bits": target.same_bits,
        "timings": None if cost is None else cost.timings,
        "plain_tokenizer": type(tokenizer) is PreTrainedTokenizerFast,
    }
    text = json.dumps(record)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / RECORD).write_text(f"{digest}\n{text}", encoding="utf-8")


class StandIn(nn.Module):
    """The parts of a model that a target reads between forwards: embedding and output head.

    Its layers are empty; they stand for those whose inputs somebody hears.

    Args:
        record: The record of a kept graph.
        tensors: Its weights by name, which lie in the mapped file until they are used.
    """

    dtype = torch.float32

    def __init__(self, record: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        from transformers.configuration_utils import PreTrainedConfig
        from transformers.generation.configuration_utils import GenerationConfig

        super().__init__()
        self.config = PreTrainedConfig.from_dict(record["config"])
        self.config.model_type = record["model_type"]
        if (settings := record["generation_config"]) is not None:
            self.generation_config = GenerationConfig.from_dict(settings)
        self.parameter_count = record["parameters"]
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(nn.Module() for _ in range(self.config.num_hidden_layers))
        parts = {part: tensors[f"logits.{part}"] for part in HEAD if f"logits.{part}" in tensors}
        self.head = BlockLinear(**parts)
        self.embedding: nn.Module = BlockEmbedding(self.head, record["factor"])
        if "embedding" in tensors:
            rows = tensors["embedding"]
            rows = rows if record["factor"] == 1.0 else rows * record["factor"]
            self.embedding = nn.Embedding(rows.shape[0], rows.shape[1], _weight=rows)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, past_key_values: Cache, logits_to_keep: int
    ) -> NoReturn:
        """Refuse: forwards run on the graph."""
        raise NotImplementedError("expected a forward through the graph")

    def num_parameters(self) -> int:
        """Return the number of the model's weights."""
        return int(self.parameter_count)

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding."""
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        """Return the output head."""
        return self.head


class CachedTarget(OnnxTarget):
    """An `OnnxTarget` over a kept graph; its model is loaded when something needs the modules.

    Args:
        folder: The folder of the graph, whose files are whole.
        record: Its record.
        load: Returns the model.
    """

    def __init__(self, folder: Path, record: dict[str, Any], load: Callable[[], Any]) -> None:
        from safetensors.torch import load_file

        self._load, self._lock, tensors = load, threading.RLock(), load_file(folder / TENSORS)
        CausalTarget.__init__(self, StandIn(record, tensors).eval())
        named = {name.partition(FREQUENCIES): each for name, each in tensors.items()}
        self.frequencies = {end: each for (_, name, end), each in named.items() if name}
        self.chains, self.packs, self.same_bits = True, False, record["same_bits"]
        if record["timings"] is not None:
            seconds, growth = record["timings"]
            self.known_cost = ForwardCost(dict(zip(SIZES, seconds, strict=True)), tuple(growth))
        self._weights, self._unchanged, self.probed = self._look(), True, self.kinds
        self._width, self._stored = record["width"], str(record["weights"])
        self._folder, self._folds = folder, STEP in record["files"]
        self._slots = Counter[bool]()  # see `STEP_AFTER`
        self._runner = self._run_by(Session(str(folder / GRAPH)), self.rotary(POSITIONS))

    def _open_batch(self) -> GraphRunner | None:
        return self._open(BATCH)

    def _open(self, name: str) -> GraphRunner | None:
        """Return what runs a graph over the mapped weights; None if it was deleted since."""
        if (path := self._folder / name).is_file():
            return self._run_by(Session(str(path)), self._runner.tables)
        text = f"{path} was deleted, and forwards are slower without it; open the model again."
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return None

    def _runner_of(self, rows: Rows, views: Views) -> GraphRunner | None:
        several, pairs = len(rows) > 1, zip(rows, views, strict=True)
        sizes = [(view.positions.shape[1], row.extent) for row, view in pairs]
        least = 1 if several else STEP_FROM
        few = self._folds and all(n <= FOLD_TO and least * n <= extent for n, extent in sizes)
        self._slots[several] += sum(extent for _, extent in sizes) if few else 0
        runner = super()._runner_of(rows, views)
        if not few or runner is None or self._slots[several] <= STEP_AFTER:
            return runner
        return (self._step_batch if several else self._step) or runner

    @cached_property
    def _step(self) -> GraphRunner | None:
        """The runner for few positions, without the operator that waits for more."""
        return self._open(STEP)

    @cached_property
    def _step_batch(self) -> GraphRunner | None:
        """The runner for several sequences; None if it changes bits."""
        runner, first = self._open(STEP_BATCH), self._together
        assert first is not None  # see `_runner_of`
        if runner is None:
            return None

        def run(rows: Rows, views: Views, *inputs: Any) -> list[Tensor]:
            few = views[0].positions.shape[1] <= FOLD_TO
            return (runner if few else first).run(rows, views, *inputs)

        return runner if batches_agree(self.vocab_size, self.run, run) else None

    @property
    def model(self) -> PreTrainedModel:
        """The model of transformers, loaded at the first call."""
        with self._lock:
            if isinstance(self._model, StandIn):
                self.model = self._load()
                self._unwrapped, self._embedding = self._model, self._model.get_input_embeddings()
                self._weights, self.probed = self._look(), self.kinds
                self.cache_argument = cache_argument(self._model)
            return self._model

    @model.setter
    def model(self, model: PreTrainedModel) -> None:
        self._model = model

    @property
    def weights(self) -> str:
        """What the graph's weights are stored in."""
        return self._stored

    @property
    def loaded(self) -> PreTrainedModel:
        """The model, or a `StandIn` if nothing has needed it yet."""
        return self._model

    def _look(self) -> list[object]:
        with self._lock:  # not while the model is loaded
            return super()._look()
