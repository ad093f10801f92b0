"""How likely a model holds given texts: one forward over each, nothing drafted."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ragspec.adapters.likelihood import score_rows
from ragspec.engine.engine import Engine
from ragspec.engine.options import end_tokens
from ragspec.errors import InputError
from ragspec.pipelines.docqa.template import is_chat
from ragspec.registry import for_extra
from ragspec.sampling.settings import Sampling

try:
    from lm_eval import utils
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs
    from tqdm import tqdm  # type: ignore[import-untyped]
except ModuleNotFoundError as error:
    raise for_extra(error) from error

MAX_GEN_TOKS = 256
# Settings of a task that change how a text is decoded; others are refused by name.
_KNOWN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "do_sample")
_LOG = logging.getLogger(__name__)
Scored = tuple[tuple[str, str] | None, list[int], list[int]]  # texts, and the ids of both


@register_model("ragspec")
class RagspecLM(TemplateLM):  # type: ignore[misc]
    """A model of lm-eval that generates by an engine.

    Args:
        model: A name or path, or an Engine.
        drafter, draft_model, budget: See `Engine`; drafter=None is plain decoding, whose greedy
            texts are the same.
        device, dtype: See `load_model`.
        batch_size: Texts at once.
        max_length: Of the context, None for the model's.
        max_gen_toks: Where a task does not say.
        add_bos_token: Whether texts begin with that token, None for what the tokenizer does.
        seed: Sampled text number i of a call has seed + i.

    Raises:
        InputError: And the errors of `Engine`.
    """

    backend = "causal"

    def __init__(
        self,
        model: str | Engine = "starter",
        drafter: Any = "auto",
        draft_model: Any = None,
        budget: str | int = "auto",
        *,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        dtype: str = "auto",
        max_length: int | None = None,
        max_gen_toks: int = MAX_GEN_TOKS,
        add_bos_token: bool | None = None,
        seed: int = 1234,
        **strange: Any,
    ) -> None:
        super().__init__()
        if strange:
            raise InputError(
                f"got the model argument {', '.join(strange)}; expected model, drafter, "
                "draft_model, budget, device, dtype, max_length, max_gen_toks, add_bos_token, seed."
            )
        self.batch_size = _batch(batch_size, max_batch_size)
        named = (drafter, draft_model, budget, _device(device), dtype)
        self.engine = _engine(model, named, self.batch_size)
        self.tokenizer = self.engine.tokenizer
        self.max_length = _limit(max_length, self.engine.target.max_length)
        self.max_gen_toks = max_gen_toks
        self.add_bos_token = add_bos_token
        self.seed = seed
        self._device = self.engine.target.device
        self.counts = dict.fromkeys(("tokens", "forwards", "drafted", "accepted", "steps"), 0)

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        result = self.tokenizer.eos_token_id
        return int(end_tokens(self.engine.model, self.tokenizer)[0] if result is None else result)

    @property
    def prefix_token_id(self) -> int:
        """The id that stands before a text without a context."""
        result = self.tokenizer.bos_token_id
        return self.eot_token_id if result is None else int(result)

    @property
    def tokenizer_name(self) -> str:
        """What lm-eval knows cached requests by."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the ids of a text; with the special tokens of its beginning unless it has them."""
        special = self.add_bos_token if add_special_tokens is None else add_special_tokens
        begun = has_bos_prefix(string, self.tokenizer.decode([self.prefix_token_id]))
        if add_special_tokens is None and begun:
            special = False
        request = {} if special is None else {"add_special_tokens": special}
        return [int(token) for token in self.tokenizer.encode(string, **request)]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation in the tokenizer's chat template; raises InputError without one."""
        if not is_chat(self.tokenizer):
            raise InputError(
                f"{self.tokenizer_name} has no chat template; expected a chat model. Leave "
                "--apply_chat_template out."
            )
        try:
            text = self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        except Exception as error:  # a template raises whatever its author wrote
            raise InputError(
                f"the model's chat template refuses the messages ({error}); expected turns as its "
                "authors ask for them. Leave the system instruction out."
            ) from error
        return str(text)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return what the model writes after each context, up to one of the strings of `until`.

        Contexts that leave no room for the new tokens lose their beginning. Raises InputError for
        settings that are not known.
        """
        texts = [""] * len(requests)
        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until")
        for numbers in _alike([request.args[1] for request in requests], self.batch_size):
            query = requests[numbers[0]].args[1]
            sampling, options = self._settings(query, numbers)
            prompts = [
                self._shortened(self.tok_encode(requests[i].args[0]), options["max_new_tokens"])
                for i in numbers
            ]
            for i, result in zip(
                numbers, self.engine.generate(prompts, sampling, **options), strict=True
            ):
                texts[i] = result.text
                self._count(result.report)
                self.cache_hook.add_partial("generate_until", requests[i].args, result.text)
                bar.update(1)
        bar.close()
        return texts

    def _settings(
        self, request: Mapping[str, Any], numbers: Sequence[int]
    ) -> tuple[Sampling, dict[str, Any]]:
        """Return the sampling and options of requests that ask for the same."""
        if not isinstance(request, Mapping):
            raise InputError(f"got the generation arguments {request!r}; expected a mapping.")
        inputs = dict(normalize_gen_kwargs(dict(request), self.max_gen_toks))
        stops = [text for text in inputs.pop("until") if text]
        new = inputs.pop("max_gen_toks")
        if inputs.get("num_beams") == 1:
            del inputs["num_beams"]
        if strange := [name for name in inputs if name not in _KNOWN]:
            raise InputError(
                f"got {', '.join(strange)} in the generation arguments; expected until, "
                f"max_gen_toks, {', '.join(_KNOWN)}."
            )
        if inputs["do_sample"] and "temperature" not in request:
            inputs["temperature"] = 1.0  # as transformers has it
        if not inputs["do_sample"]:
            inputs = {k: v for k, v in inputs.items() if k == "repetition_penalty"}
        seeds = [self.seed + number for number in numbers]
        return Sampling(**inputs, seed=seeds), {"max_new_tokens": new, "stop": stops}

    def _shortened(self, tokens: list[int], new: int) -> list[int]:
        """Return the last tokens of a context that leave room for so many new ones."""
        room = self.max_length - new
        if room < 1:
            raise InputError(
                f"max_gen_toks is {new} and the context has {self.max_length} tokens; expected "
                "fewer. Pass max_gen_toks= to the task or the model."
            )
        if len(tokens) > room:
            _LOG.warning("a context of %d tokens is cut to its last %d", len(tokens), room)
        return tokens[-room:] or [self.prefix_token_id]

    def _count(self, report: Any) -> None:
        self.counts["tokens"] += report.tokens
        self.counts["forwards"] += report.forward_passes
        self.counts["drafted"] += report.drafted
        self.counts["accepted"] += report.accepted
        self.counts["steps"] += report.steps

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each whole text, in windows as long as the context.

        Every token is predicted once, those of a last window with as much before them as fits.
        """
        windows: list[Scored] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            for context, message in utils.get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, 1
            ):
                windows.append((None, *utils.make_disjoint_window((context, message))))
                owners.append(number)
        sums = [0.0] * len(requests)
        for number, (result, _) in zip(
            owners, self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm), strict=True
        ):
            sums[number] += result
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def _loglikelihood_tokens(
        self, requests: list[Scored], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return for each (texts, context ids, continuation ids) the sum of log-probabilities.

        And whether greedy decoding would write the continuation. Contexts that are too long lose
        their beginning; raises InputError for a continuation that is longer than the context.
        """
        results = [(0.0, False)] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1] + requests[i][2]))
        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood")
        for start in range(0, len(order), self.batch_size):
            numbers = order[start : start + self.batch_size]
            rows = [self._row(*requests[i][1:]) for i in numbers]
            for i, scored in zip(
                numbers, score_rows(self.engine.target, rows, self.eot_token_id), strict=True
            ):
                results[i] = scored
                if requests[i][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], scored)
                bar.update(1)
        bar.close()
        return results

    def _row(self, context: list[int], message: list[int]) -> tuple[list[int], int]:
        """Return the ids that are read and scored, and how many of them are scored."""
        if not context or len(message) > self.max_length:
            raise InputError(
                f"got a context of {len(context)} tokens and {len(message)} to score; expected "
                f"one or "
                f"more, and at most {self.max_length} to score. Pass max_length= to the model."
            )
        return (context + message)[-(self.max_length + 1) :], len(message)

    def get_model_info(self) -> dict[str, Any]:
        """Return what stands in the results beside lm-eval's own settings."""
        drafter = self.engine.drafter
        forwards, steps = self.counts["forwards"], self.counts["steps"]
        return {
            "model_num_parameters": int(self.engine.model.num_parameters()),
            "model_dtype": str(self.engine.target.dtype),
            "ragspec": {
                "drafter": None if drafter is None else drafter.name,
                **self.counts,
                "tokens_per_forward": self.counts["tokens"] / forwards if forwards else 0.0,
                "mean_acceptance_length": 1 + self.counts["accepted"] / steps if steps else 0.0,
            },
        }


def _engine(model: Any, named: tuple[Any, ...], batch_size: int) -> Engine:
    """Return the engine that is given, or one of a name; named: as `from_pretrained` has it."""
    if not isinstance(model, Engine):
        return Engine.from_pretrained(str(model), *named, batch_size=batch_size)
    if named != ("auto", None, "auto", "auto", "auto"):
        raise InputError("got an Engine with settings of one; expected it alone: it has its own.")
    if model.tokenizer is None:
        raise InputError("got an engine without a tokenizer; expected one that has it.")
    return model


def _device(request: str | None) -> str:
    """Return where the model goes: the harness names a GPU by itself, which need not be there."""
    if request is None:
        return "auto"
    try:
        there = torch.get_device_module(request.partition(":")[0]).is_available()
    except RuntimeError:  # no kind of device; the engine says so
        return request
    if not there:
        _LOG.warning("%s cannot be used on this machine; the model goes to what can", request)
    return request if there else "auto"


def _batch(request: int | str | None, most: int | None) -> int:
    """Return how many texts are decoded at once; "auto" leaves it to us."""
    if isinstance(request, str) and request.startswith("auto"):
        request = None
    try:
        size = 16 if request is None else int(request)
    except ValueError:
        size = 0
    if size < 1:
        raise InputError(f"batch_size is {request!r}; expected a whole number from 1, or auto.")
    return size if most is None else min(size, most)


def _limit(request: int | None, current: int | None) -> int:
    """Return the tokens of the context."""
    if request is None and current is None:
        raise InputError("the model does not say how long its context is; pass max_length=.")
    if request is not None and (
        not isinstance(request, int) or request < 2 or request > (current or request)
    ):
        raise InputError(f"max_length is {request!r}; expected a number from 2 to {current}.")
    result = current if request is None else request
    assert result is not None
    return result


def _alike(settings: Sequence[Any], size: int) -> Iterator[list[int]]:
    """Yield the numbers of requests that ask for the same, at most `size` at a time."""
    groups: dict[str, list[int]] = {}
    for number, request in enumerate(settings):
        groups.setdefault(repr(request), []).append(number)
    for numbers in groups.values():
        for start in range(0, len(numbers), size):
            yield numbers[start : start + size]


def main() -> None:
    """Run lm-eval's own command line, which knows the model "ragspec" by now."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
