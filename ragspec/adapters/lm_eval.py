"""lm-eval: its transformers model, with texts from an engine.

    python -m ragspec.adapters.lm_eval run --model ragspec --model_args model=smollm2 --tasks gsm8k

Likelihoods, encoding and chat templates are those of `HFLM`. Written against lm-eval 0.4.13.
"""

from __future__ import annotations

import logging
from inspect import signature
from itertools import count
from typing import Any, ClassVar

import torch
from torch import Tensor

from ragspec.engine.engine import Engine
from ragspec.errors import InputError
from ragspec.models.load import load_model
from ragspec.pipelines.answering.template import is_chat
from ragspec.registry import for_extra, unknown
from ragspec.sampling.settings import Sampling

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ModuleNotFoundError as error:
    raise for_extra(error) from error

SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
NOT_HERE = {"self", "pretrained", "tokenizer", "kwargs"}
log = logging.getLogger(__name__)


@register_model("ragspec")
class RagspecLM(HFLM):  # type: ignore[misc]
    """A model of lm-eval that generates with an engine.

    Args:
        model: Name or path, or an Engine.
        drafter, draft_model, budget: See `Engine`. `drafter=None` decodes without speculation, with
            the same greedy texts.
        device, dtype: See `load_model`.
        batch_size: Texts decoded in one batch; 16 for "auto".
        seed: The i-th sampled text has the seed `seed + i`.
        settings: Further arguments of `HFLM`, such as max_length, add_bos_token.

    Raises:
        InputError: An argument is unknown or out of range; also the errors of `Engine`.
    """

    KNOWN: ClassVar[frozenset[str]] = frozenset(signature(HFLM.__init__).parameters) - NOT_HERE

    def __init__(
        self,
        model: str | Engine = "starter",
        drafter: Any = "auto",
        draft_model: Any = None,
        budget: str | int = "auto",
        *,
        device: str | None = None,
        dtype: str = "auto",
        batch_size: int | str | None = None,
        seed: int = 1234,
        **settings: Any,
    ) -> None:
        for name in settings:
            if name not in self.KNOWN:
                raise InputError(unknown("model argument", name, self.KNOWN))
        text = str(batch_size or "auto")
        size = 16 if text.startswith("auto") else int(text) if text.isdecimal() else 0
        if size < 1:
            raise InputError(f"batch_size is {batch_size!r}; expected a number from 1, or auto.")
        named = (drafter, draft_model, budget, _device(device), dtype)
        if not isinstance(model, Engine):
            loaded, tokenizer = load_model(
                str(model), named[3], dtype
            )  # its own weights, if "auto"
            model = Engine(loaded, tokenizer, *named[:3], max_batch_size=size)
        elif named != ("auto", None, "auto", "auto", "auto"):
            raise InputError("got an Engine and settings of one; expected it alone.")
        if model.tokenizer is None:
            raise InputError("got an engine without a tokenizer; expected one that has it.")
        limit, most = model.target.max_length, settings.get("max_length")
        if most is not None and not 2 <= int(most) <= (limit or int(most)):
            raise InputError(f"max_length is {most}; expected a number from 2 to {limit}.")
        settings["max_length"] = most or limit
        self.engine, self.seed = model, seed
        self._texts = count()
        super().__init__(model.model, tokenizer=model.tokenizer, batch_size=size, **settings)

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> str:
        """Return a conversation in the chat template; raise InputError without a template."""
        if not is_chat(self.tokenizer):
            raise InputError(
                f"{self.tokenizer_name} has no chat template; expected a chat model. Leave "
                "--apply_chat_template out."
            )
        return str(super().apply_chat_template(*args, **kwargs))

    def _model_generate(
        self,
        context: Tensor,
        max_length: int,
        stop: list[str],
        *,
        attention_mask: Tensor | None = None,
        do_sample: bool | None = None,
        **settings: Any,
    ) -> Tensor:
        """Return contexts [B, S], padded on the left, with their continuations [B, max_length]."""
        if settings.get("num_beams") == 1:
            del settings["num_beams"]
        for name in settings:
            if name not in SETTINGS:
                raise InputError(unknown("generation argument", name, ("do_sample", *SETTINGS)))
        if do_sample and "temperature" not in settings:
            settings["temperature"] = 1.0  # the default of transformers
        if not do_sample:
            settings = {k: v for k, v in settings.items() if k == "repetition_penalty"}
        whole = torch.ones_like(context) if attention_mask is None else attention_mask
        prompts = [row[mask.bool()].tolist() for row, mask in zip(context, whole, strict=True)]
        sampling = Sampling(**settings, seed=[self.seed + next(self._texts) for _ in prompts])
        rows = torch.full((len(context), max_length), self.eot_token_id)
        rows[:, : context.shape[1]] = context
        new = max_length - context.shape[1]
        stops = [text for text in stop if text]
        texts = self.engine.generate(prompts, sampling, max_new_tokens=new, stop=stops)
        for row, text in zip(rows, texts, strict=True):
            row[context.shape[1] :][: len(text.tokens)] = torch.tensor(text.tokens)
        return rows


def _device(name: str | None) -> str:
    """Return the device to load to; "auto" if lm-eval's default, a GPU, is not there."""
    if name is None:
        return "auto"
    try:
        is_there = torch.get_device_module(name.partition(":")[0]).is_available()
    except RuntimeError:  # unknown kind of device; the engine reports it
        return name
    if not is_there:
        log.warning("%s cannot be used on this machine; the model goes to what can", name)
    return name if is_there else "auto"


def main() -> None:
    """Run lm-eval's command line with the model "ragspec" registered."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
