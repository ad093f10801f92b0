"""Sessions of ONNX Runtime, and what their graphs share."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ragspec.models.device import thread_count

if TYPE_CHECKING:
    from onnx import GraphProto, TensorProto

MICROSOFT = "com.microsoft"  # the domain of ONNX Runtime's own operators
OPSET, IR_VERSION = 20, 10
PACKAGES = ("onnxruntime", "onnx")
Place = Mapping[str, str]  # the external data of a weight in ONNX's format
IN_MEMORY: Place = MappingProxyType({"location": "memory"})
SETTINGS = (
    "ORT_DISABLE_TELEMETRY",  # releases from 1.29 on upload figures of use by default
    "ORT_GQA_DISABLE_FLASH_ATTENTION",  # from 1.28 on, its bits differ with the width of a forward
)


def missing_package() -> str:
    """Return a package of ONNX Runtime that is not installed, "" for none."""
    return next((name for name in PACKAGES if find_spec(name) is None), "")


def onnx_runtime() -> ModuleType:
    """Return the package onnxruntime, without telemetry and with equal bits in all widths."""
    for name in SETTINGS:
        os.environ.setdefault(name, "1")
    return importlib.import_module("onnxruntime")


class Session:
    """A graph of ONNX Runtime over weights in memory.

    Args:
        proto: The graph, in ONNX's format, or the file of one with its weights in files beside it.
        weights: Its external weights by name, contiguous and on the CPU.
        save: Where the graph is written, and its weights as the runtime packs them beside it.
    """

    def __init__(
        self,
        proto: bytes | str,
        weights: Mapping[str, Tensor] = MappingProxyType({}),
        save: Path | None = None,
    ) -> None:
        runtime = onnx_runtime()
        options = runtime.SessionOptions()
        options.intra_op_num_threads = thread_count()
        options.enable_cpu_mem_arena = False
        options.enable_mem_pattern = False  # it holds one for every size of inputs, and takes time
        # Its threads wait busily within a run; after it they would slow torch and other sessions.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        self.value: Callable[[Any], Any] = runtime.OrtValue.ortvalue_from_numpy
        self._held = [self.value(weight.numpy()) for weight in weights.values()]  # read in place
        if weights:
            options.add_external_initializers(list(weights), self._held)
        if save is not None:
            options.optimized_model_filepath = str(save)
            options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
            name = "session.optimized_model_external_initializers_file_name"
            options.add_session_config_entry(name, f"{save.stem}.bin")
            name = "session.save_external_prepacked_constant_initializers"
            options.add_session_config_entry(name, "1")
        self.inner = runtime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])


def declared(name: str, tensor: Tensor, place: Place | None = None) -> TensorProto:
    """Return the declaration of a weight that a `Session` is handed, or that lies in a file."""
    from onnx import TensorProto

    kind = TensorProto.FLOAT if tensor.is_floating_point() else TensorProto.UINT8
    proto = TensorProto(name=name, data_type=kind, dims=tensor.shape)
    proto.data_location = TensorProto.EXTERNAL
    for key, value in (place or IN_MEMORY).items():
        proto.external_data.add(key=key, value=value)
    return proto


def serialized(graph: GraphProto) -> bytes:
    """Return a graph in ONNX's format."""
    from onnx import helper

    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
    return bytes(proto.SerializeToString())
