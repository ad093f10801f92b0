"""Log-probabilities are told of the text alone, and say where in it their tokens begin."""

from functools import partial
from typing import Any

import httpx
import pytest

from ragspec import Engine, Sampling
from tests.support import tiny
from tests.support.served import NAME, parts_of, post, text_of

PROMPT = "A draft tree"
OPTIONS: Any = {"max_new_tokens": 24, "ignore_eos": True, "logprobs": 1}


@pytest.fixture(scope="module")
def instance() -> Engine:
    """Return an engine whose tokens are several characters, or parts of one."""
    tokenizer = tiny.bpe_tokenizer()
    return Engine(tiny.model("llama", vocab_size=len(tokenizer), seed=4), tokenizer, drafter=None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_tokens_begin_where_the_text_before_them_ends_and_none_behind_a_stop(
    client: httpx.Client, instance: Engine, stream: bool, seed: int
) -> None:
    sampling = Sampling(temperature=1.0, seed=seed)
    free = instance.generate(PROMPT, sampling, **OPTIONS)
    decode = partial(instance.tokenizer.decode, skip_special_tokens=True)
    starts = [len(decode(free.tokens[:at]).rstrip("\ufffd")) for at in range(24)] + [len(free.text)]
    for stop in ("never written", free.text[9:11], free.text[12:15]):
        text, cut = free.text.partition(stop)[:2]
        count = sum(start < len(text) for start in starts[:-1]) if cut else 24
        body: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "temperature": 1.0, "seed": seed}
        body |= {"max_tokens": 24, "ignore_eos": True, "logprobs": 1, "stop": stop}
        body |= {"stream": stream, "stream_options": {"include_usage": True}}
        lines = parts_of(post(client, body), stream)
        assert text_of(lines) == text
        inputs, logprobs = "", dict[str, list[Any]]()
        for choice in (choice for each in lines for choice in each["choices"]):
            inputs += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                logprobs[name] = logprobs.get(name, []) + values
            if choice["logprobs"] and len(inputs) < len(text):  # those that end in it
                ended, known = [end for end in starts[1:] if end <= len(inputs)], logprobs["tokens"]
                assert sum(end < len(inputs) for end in ended) <= len(known) <= len(ended)
        assert logprobs["tokens"] == [decode([token]) for token in free.tokens[:count]]
        assert logprobs["text_offset"] == starts[:count]
        assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == count
        used = instance.generate(PROMPT, sampling, **OPTIONS, stop=stop)
        assert lines[-1]["usage"]["completion_tokens"] == len(used.tokens) >= count
