"""A kNN language model: target and datastore choose every token together.

Khandelwal et al. 2020 (arXiv 1911.00172): the distribution of the next token is a mixture of the
target's distribution and of the tokens that followed the most similar contexts in the datastore.
Speculation hides the time of these searches (RaLMSpec, arXiv 2401.14021; see
`retrievers.knn.text`). The text is the same as that of searching for every token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ragspec.engine.prompts import encode_prompts
from ragspec.engine.request import refuse_unknown, stop_strings
from ragspec.errors import InputError
from ragspec.pipelines.answering.strides import FinalText
from ragspec.reports.generation import Generation
from ragspec.retrievers.knn.datastore import Datastore
from ragspec.retrievers.knn.distributions import Knn
from ragspec.retrievers.knn.text import KnnText
from ragspec.retrievers.speculation.os3 import StrideSchedule
from ragspec.sampling.settings import Sampling, seeded
from ragspec.sampling.text_output import TextOutput

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine

K, WEIGHT = 32, 0.25
SPREAD = 15.0  # the best quotient was 10 for 60,000 and 18 for a million keys (starter model)
FURTHER = 0.1  # cost of each further query of a search, about, as a share of a single query
# Options that `KnnLM` sets itself.
OF_MODEL = ("stop_after", "transform", "resume_from")


class KnnLM:
    """Continues texts with an engine's model and a datastore of that model.

    The constructor prepares the keys for searches, which takes seconds for a million. Measured
    times and the success of guesses carry over to the next text.

    Args:
        k: Number of neighbours.
        weight: Their weight in the mixture, 0 to 1.
        temperature: Temperature of squared distances; None for a 15th of the variance of the keys.
            At the paper's 1 the nearest neighbour often gets the whole weight.
        speculate: "auto", "off", or the number of tokens written on guesses before they are
            checked. It never changes the text, whose label is `exact-for(knn)`.

    Raises:
        InputError, StoreError: The datastore is of another model or tokenizer, or an argument is
            out of range.
    """

    def __init__(
        self,
        engine: Engine,
        store: Datastore,
        *,
        k: int = K,
        weight: float = WEIGHT,
        temperature: float | None = None,
        speculate: str | int = "auto",
    ) -> None:
        if engine.rule.label != "exact":
            raise InputError(
                f"the engine's rule is {engine.rule.name!r}; expected 'walk', under which a text "
                "does not depend on its drafts."
            )
        if not 1 <= k <= len(store):
            raise InputError(f"k is {k}; expected 1 to {len(store):,}, the keys of the datastore.")
        if not 0.0 <= weight <= 1.0:
            raise InputError(f"weight is {weight}; expected 0 to 1.")
        if temperature is not None and not temperature > 0.0:
            raise InputError(f"temperature is {temperature}; expected above 0, or None.")
        store.check(engine)
        if temperature is None:  # three digits, so that the rounding of a machine does not matter
            temperature = float(f"{store.near.variance / SPREAD:.3g}") or 1.0
        self.engine = engine
        self.knn = Knn(store, k, weight, temperature)
        self.speculate = speculate
        self.schedule = StrideSchedule.named(speculate, overlap=False)
        self.schedule.search.further = FURTHER

    def generate(
        self,
        prompt: Any,
        sampling: Sampling | None = None,
        *,
        stream: Callable[[str], None] | None = None,
        **options: Any,
    ) -> Generation:
        """Continue one prompt; `report.retrieval` has the searches.

        Args:
            prompt: Text, chat messages or token ids.
            stream: Called with text that is final. An interrupt then ends the text and keeps it.
            options: Further arguments of `Engine.generate`.

        Raises:
            InputError: There are several prompts, n is above 1, or `KnnLM` sets the option itself.
            PromptTooLongError: The prompt does not fit the context.
        """
        refuse_unknown(options)
        for name in OF_MODEL:
            if options.get(name):
                raise InputError(f"got {name}=, which KnnLM sets itself; leave it out.")
        sampling = seeded(sampling or Sampling(), "KnnLM.generate()")
        encoded = encode_prompts(prompt, self.engine.tokenizer, self.engine.target.input_size)
        if not encoded.single:
            raise InputError(f"got {len(encoded.ids)} prompts; expected one text at a time.")
        if stream is not None and self.engine.tokenizer is None:
            raise InputError("stream= takes text but the engine has no tokenizer; pass one")
        prompt, stops = encoded.ids[0], stop_strings(options.get("stop"), self.engine.tokenizer)
        final = FinalText(stream, self.engine.tokenizer, stops)
        text = KnnText(
            self.engine.without_callbacks(), self.knn, prompt, sampling, options, self.schedule,
            lambda tokens, ended: final.push(prompt, tokens, ends=ended),
            waits=self.speculate == "off", whole=stream is None,
        )  # fmt: skip
        try:
            with self.engine.hold():
                generation = text.run()
        except KeyboardInterrupt:
            if stream is None or not text.cut():
                raise
            partial = text.result()
            report = replace(partial.report, finish_reason="cancelled")
            output = TextOutput(self.engine.tokenizer, partial.prompt_tokens)
            output.push(partial.tokens)
            generation = replace(
                partial, text=output.text, finish_reason="cancelled", report=report
            )
        self.engine.notify(generation)
        return generation
