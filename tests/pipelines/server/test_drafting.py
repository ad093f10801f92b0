"""Engines of requests: drafters by folder or by name, with costs measured at the start."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ragspec.drafters.heads.files import save_head
from ragspec.engine.engine import Engine
from ragspec.errors import InputError
from ragspec.pipelines.cli.serve import ServeOptions, load
from ragspec.pipelines.console.options import EngineOptions, SearchOptions
from ragspec.pipelines.console.terminal import Terminal
from ragspec.pipelines.server.serving import Serving
from ragspec.pipelines.server.settings import ServerSettings
from ragspec.retrievers.methods.suffix_decoding import SuffixDrafter
from ragspec.verification.causal import CausalTarget
from tests.support import heads, tiny
from tests.support.served import NAME, engine, post, served

LIMITS: Any = {"ignore_eos": True}
REQUESTS = {"model": NAME, "prompt": "A draft", "temperature": 0, "max_tokens": 12, **LIMITS}


@pytest.mark.parametrize("beside", [None, "context"])
def test_a_server_drafts_with_the_head_of_a_folder(tmp_path: Path, beside: str | None) -> None:
    model, head = tmp_path / "model", tmp_path / "head"
    instance = tiny.model("llama", dtype=torch.float32, seed=4)
    instance.save_pretrained(model)
    tiny.tokenizer().save_pretrained(model)
    save_head(heads.fresh(CausalTarget(instance)), head)
    drafter = str(head) if beside is None else f"{head},{beside}"
    chosen = EngineOptions("cpu", "float32", str(model), drafter=drafter, budget="4")
    options = ServeOptions(SearchOptions(), chosen, ServerSettings(), name=NAME)
    result = load(options, Terminal())
    selection = result.engine.with_drafter(None).generate("A draft", max_new_tokens=12, **LIMITS)
    with served(result.engine, default=result.default) as (client, _):
        message = post(client, REQUESTS).json()
        assert message["choices"][0]["text"] == selection.text
        assert message["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
        assert 'ragspec_drafted_tokens_total{source="head"}' in client.get("/metrics").text
        # Requests may not name folders.
        other = post(client, {**REQUESTS, "drafter": str(model)})
        assert other.status_code == 400 and other.json()["error"]["code"] == "unknown_name"
    result.close(0.0)


@pytest.mark.parametrize(
    "names", ["model", "rest", "fused", "fused,context", "fused,fused", "fused,auto"]
)
def test_a_method_may_use_the_sources_of_the_server(names: str) -> None:
    draft = tiny.model("llama", dtype=torch.float64)
    serving = Serving(Engine(engine().model, tiny.tokenizer(), None, draft), NAME)
    serving.stores["a"] = Mock(drafter=Mock(return_value=SuffixDrafter()))
    expected = ["context"] * ("fused" in names) + ["recycling"] * ("auto" in names)
    for chosen in (names.split(","), None):
        drafter = serving.engine_of("tenant", chosen).drafter
        assert drafter and [d.name for d in drafter.drafters] == [*expected, "suffix", "model"]
        serving.default = (tuple(names.split(",")), "auto")
    assert (serving.engine_of("tenant", store=None).drafter is None) == (names == "rest")
    with pytest.raises(InputError, match=r"no store; expected one\. Leave `store` out, or name an"):
        serving.engine_of("tenant", "rest", store=None)
    serving.close(0.0)


def test_requests_do_not_measure_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = engine(drafter=None)
    assert plain.cost is None
    serving = Serving(plain, NAME)

    measuring = Mock(side_effect=AssertionError("a request measures"))
    monkeypatch.setattr(CausalTarget, "time_forward", measuring)
    try:
        for drafter, budget in (("context", None), ("auto", "auto"), (None, "auto")):
            result = serving.engine_of("tenant", drafter, budget)
            assert result.drafter is None or result.cost is not None
        assert serving.engine_of("tenant", "context").drafter is not None
        assert plain.cost is None  # the caller's engine is not changed
    finally:
        serving.close(0.0)
