"""Random requests through all interfaces at once: each equals plain decoding of it alone."""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import pytest
import torch

from ragspec import Engine, Sampling, bridge
from tests.support import tiny
from tests.support.served import NAME, events, served, text_of

PROMPTS = ("A draft", "A draft model proposes", "the target", "It is kept, and", "The first that")


@dataclass(frozen=True)
class Case:
    """A request with its tokens and text."""

    prompt: str
    settings: dict[str, Any]
    options: dict[str, Any]
    tokens: list[int]
    text: str

    @property
    def sampling(self) -> Sampling:
        return Sampling(**self.settings)


Output = tuple[list[int] | int, str]  # tokens or their number, and the text


@dataclass(frozen=True)
class Interfaces:
    """All interfaces to one model."""

    engine: Engine
    client: httpx.Client
    model: Any
    drafter: str | None

    def generate(self, case: Case) -> Output:
        result = self.engine.generate(case.prompt, case.sampling, **case.options)
        return result.tokens, result.text

    def submit(self, case: Case) -> Output:
        result = self.engine.submit(case.prompt, case.sampling, **case.options).result(60)
        return result.tokens, result.text

    def watch(self, case: Case) -> Output:
        """Read the steps of a handle, as the server does."""
        handle = self.engine.submit(case.prompt, case.sampling, **case.options)
        tokens = [token for step in handle for token in step.tokens]
        return tokens, handle.result().text

    def stream(self, case: Case) -> Output:
        stream = self.engine.stream(case.prompt, case.sampling, **case.options)
        text = "".join(stream)
        return stream.result.tokens, text

    def resume(self, case: Case) -> Output:
        """Pause after three tokens, and write the rest in another call."""
        pieces: list[str] = []
        tokens: list[int] = []
        for stop_after in (3, None):
            options = {**case.options, "resume_from": tokens, "stop_after": stop_after}
            stream = self.engine.stream(case.prompt, case.sampling, **options)
            pieces += stream
            tokens = stream.result.tokens
            if stream.result.finish_reason != "paused":
                break
        return tokens, "".join(pieces)

    def bridge(self, case: Case) -> Output:
        tokenizer = self.engine.tokenizer
        ids = torch.tensor([tokenizer(case.prompt)["input_ids"]])
        settings = {name: value for name, value in case.settings.items() if name != "seed"}
        speculation = bridge.Speculation(self.drafter, seed=case.settings["seed"])
        bridge.generate(
            self.model,
            ids,
            speculation=speculation,
            tokenizer=tokenizer,
            stop_strings=list(case.options.get("stop", ())) or None,
            attention_mask=torch.ones_like(ids),
            do_sample=settings["temperature"] > 0,
            top_k=0,  # the default of transformers is 50
            max_new_tokens=case.options["max_new_tokens"],
            **{name: value for name, value in settings.items() if value},
        )
        # transformers returns stop strings too.
        (generation,) = speculation.generations
        assert generation.text.startswith(case.text)
        return generation.tokens, case.text

    def serve(self, case: Case, stream: bool) -> Output:
        body = {"model": NAME, "prompt": case.prompt, "stream": stream, **case.settings}
        body["max_tokens"] = case.options["max_new_tokens"]
        body["stop"] = list(case.options.get("stop", ())) or None
        if stream:
            body["stream_options"] = {"include_usage": True}
        response = self.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        if not stream:
            result = response.json()
            return result["usage"]["completion_tokens"], result["choices"][0]["text"]
        lines = events(response)
        return lines[-1]["usage"]["completion_tokens"], text_of(lines)

    @property
    def all(self) -> list[Callable[[Case], Output]]:
        engine = [self.generate, self.submit, self.watch, self.stream, self.resume, self.bridge]
        return [*engine, partial(self.serve, stream=False), partial(self.serve, stream=True)]


def draw(rng: random.Random, plain: Engine) -> Case:
    """Return a random request with the output of plain decoding."""
    settings: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.7, 1.2]),
        "seed": rng.randrange(1000),
        "top_p": rng.choice([1.0, 0.8]),
        "repetition_penalty": rng.choice([1.0, 1.0, 1.3]),
    }
    options: dict[str, Any] = {"max_new_tokens": rng.randrange(1, 24)}
    prompt = rng.choice(PROMPTS)
    result = plain.generate(prompt, Sampling(**settings), **options)
    clean = [at for at in range(len(result.text)) if "\ufffd" not in result.text[at : at + 2]]
    if clean and rng.random() < 0.4:
        start = rng.choice(clean)
        options["stop"] = [result.text[start : start + rng.randrange(1, 3)], "\x00never"]
        result = plain.generate(prompt, Sampling(**settings), **options)
        assert options["stop"][0] not in result.text
    return Case(prompt, settings, options, result.tokens, result.text)


@pytest.fixture(scope="module", params=["context", "auto"])
def interfaces(request: pytest.FixtureRequest) -> Iterator[Interfaces]:
    tokens = tiny.bpe_tokenizer()
    changes: dict[str, Any] = {"vocab_size": len(tokens), "dtype": torch.float64}
    model, other = (tiny.model("llama", seed=4, num_hidden_layers=1, **changes) for _ in range(2))
    engine = Engine(model, tokens, request.param).with_limits(3, chunk=4)
    with served(engine) as (client, _):
        yield Interfaces(engine, client, other, request.param)


def test_every_interface_returns_the_text_of_each_request_alone(
    interfaces: Interfaces, request: pytest.FixtureRequest
) -> None:
    rng = random.Random(7)
    plain = Engine(interfaces.engine.target, interfaces.engine.tokenizer, None, max_batch_size=1)
    plain.prefix_cache.max_bytes = 0
    cases = [draw(rng, plain) for _ in range(500 if request.config.getoption("--slow") else 70)]
    calls = [rng.choice(interfaces.all) for _ in cases]
    with ThreadPoolExecutor(6) as workers:
        results = workers.map(lambda call, case: call(case), calls, cases)
        for call, case, (tokens, text) in zip(calls, cases, results, strict=True):
            expected = case.tokens if isinstance(tokens, list) else len(case.tokens)
            assert (tokens, text) == (expected, case.text), call
