"""lm-eval: its transformers model, with texts from an engine.

    python -m ragspec.adapters.lm_eval run --model ragspec --model_args model=smollm2 --tasks gsm8k

Likelihoods, encoding and chat templates are those of `HFLM`. Written against lm-eval 0.4.13.
"""

import logging
from contextlib import suppress
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ragspec.drafters.build import DrafterSpec, DraftModel
from ragspec.engine.engine import Engine
from ragspec.engine.request import expect_engine
from ragspec.errors import InputError
from ragspec.models.load import load_model
from ragspec.registry import expect_known, optional_packages, unknown
from ragspec.sampling.settings import Sampling, checked_count

with optional_packages():
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM

SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Arguments of HFLM that do not load a model.
KNOWN = (
    *("truncation", "logits_cache", "max_length", "softmax_dtype", "mixed_precision_dtype"),
    *("max_batch_size", "add_bos_token", "prefix_token_id"),
    *("think_end_token", "enable_thinking", "chat_template_args"),
)


@register_model("ragspec")
class RagspecLM(HFLM):  # type: ignore[misc]
    """A model of lm-eval that generates with an engine.

    Args:
        model: Name or path, or an Engine.
        drafter, draft_model, budget: See `Engine`; `drafter=None` gives the same greedy texts.
        device, dtype: See `load_model`.
        batch_size: Texts decoded in one batch; 16 for "auto".
        settings: seed, 1234 by default (the i-th sampled text has the seed `seed + i`), and
            arguments of `HFLM` that do not load a model, such as max_length.

    Raises:
        InputError: An argument is unknown or out of range; also the errors of `Engine`.
    """

    def __init__(
        self,
        model: str | Engine = "starter",
        drafter: DrafterSpec = "auto",
        draft_model: DraftModel = None,
        budget: str | int = "auto",
        *,
        device: str | None = None,
        dtype: str = "auto",
        batch_size: int | str | None = None,
        **settings: Any,
    ) -> None:
        self._seeds = count(settings.pop("seed", 1234))
        for name in [each for each in settings if each not in KNOWN]:
            remedy = "Name a model that loads without it, such as a merged one, or pass an Engine."
            raise InputError(f"{unknown('model argument', name, KNOWN)} {remedy}")
        size: Any = "16" if str(batch_size or "auto").startswith("auto") else str(batch_size)
        size = checked_count(int(size) if size.isdecimal() else size, "batch_size")
        if not isinstance(model, Engine):
            weights = load_model(model, _device(device), dtype)
            model = Engine(*weights, drafter, draft_model, budget, max_batch_size=size)
        elif (drafter, draft_model, budget, device, dtype) != ("auto", None, "auto", None, "auto"):
            raise InputError("got an Engine and settings of one; expected it alone.")
        expect_engine(model)
        limit = model.target.max_length
        most = settings.setdefault("max_length", limit)
        if most is not None and not 2 <= int(most) <= (limit or int(most)):
            raise InputError(f"max_length is {most}; expected a number from 2 to {limit}.")
        self.engine = model
        super().__init__(model.model, tokenizer=model.tokenizer, batch_size=size, **settings)

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **settings: Any
    ) -> Tensor:
        """Return contexts [B, S], padded on the left, followed by their continuations [B, T]."""
        whole, sampled = settings.pop("attention_mask"), settings.pop("do_sample")
        settings = {k: v for k, v in settings.items() if (k, v) != ("num_beams", 1)}
        expect_known("generation argument", settings, ("do_sample", *SETTINGS))
        if sampled:
            settings.setdefault("temperature", 1.0)  # the default of transformers
        else:
            settings = {k: v for k, v in settings.items() if k == "repetition_penalty"}
        rows = [row[mask.bool()].tolist() for row, mask in zip(context, whole, strict=True)]
        prompts = [row or [self.prefix_token_id] for row in rows]  # as for likelihoods
        texts = self.engine.generate(
            prompts,
            Sampling(**settings, seed=[next(self._seeds) for _ in prompts]),
            max_new_tokens=max_length - context.shape[1],
            stop=[text for text in stop if text],
        )
        rows = [context.new_tensor(text.tokens) for text in texts]
        tails = pad_sequence(rows, batch_first=True, padding_value=self.eot_token_id)
        return torch.cat((context, tails), dim=1)


def _device(name: str | None) -> str:
    """Return the device to load to; "auto" if lm-eval's default, a GPU, is not there."""
    name = name or "auto"
    with suppress(RuntimeError):  # an unknown kind of device, which `load_model` reports
        if not torch.get_device_module(name.partition(":")[0]).is_available():
            logging.getLogger(__name__).warning("%s is not available; using what is", name)
            return "auto"
    return name


if __name__ == "__main__":  # lm-eval's command line, with the model "ragspec" registered
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
