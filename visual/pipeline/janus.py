"""`JanusPipeline`: images by Janus and Janus-Pro (arXiv 2410.13848, 2501.17811)."""

from __future__ import annotations

from typing import Any

from ragspec.errors import InputError
from ragspec.visual.models.raster import Raster
from ragspec.visual.models.transformers_targets import (
    JanusTarget,
    janus_raster,
    janus_unconditional,
)
from ragspec.visual.models.vq import JanusVQ
from ragspec.visual.pipeline.prompt_parts import mark, text_ids
from ragspec.visual.pipeline.prompted import PromptPipeline

TEMPLATE = "<|User|>: {prompt}\n\n<|Assistant|>:"  # published; used without a chat template


class JanusPipeline(PromptPipeline):
    """Generates with a `JanusForConditionalGeneration`; see `PromptPipeline`.

    The chat template takes the prompt as a user message; the begin-of-image token follows it.
    Guidance leads away from the same prompt with padding in place of its words, so Janus takes no
    negative prompt. An image has the square grid that the model was trained on, or any grid of at
    most as many codes.
    """

    target_kind = JanusTarget
    decoder_kind = JanusVQ
    guidance = 5.0

    def _raster_of(self, model: Any) -> Raster:
        return janus_raster(model)

    def _ids(self, text: str, raster: Raster) -> list[int]:
        begin = mark(self.text_tokenizer, "boi_token", "<begin_of_image>")
        return text_ids(self.text_tokenizer, text + begin, begin)

    def _request(self, prompt: str) -> str:
        if self.prompt_template is not None:
            return super()._request(prompt)
        chat = getattr(self.processor, "chat_template", None)
        if chat is None:
            return TEMPLATE.replace("{prompt}", prompt)
        # A processor's template reads a list of parts, a tokenizer's template reads a string.
        parts = "'text'" in chat or '"text"' in chat or ".text" in chat
        content: Any = [{"type": "text", "text": prompt}] if parts else prompt
        text: str = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        return text

    def _nothing(self, ids: list[int], raster: Raster) -> list[int]:
        config, tokenizer = self.model.generation_config, self.text_tokenizer
        begin = mark(tokenizer, "boi_token", "<begin_of_image>")
        extra = getattr(config, "generation_kwargs", None) or {}
        candidates = {
            "bos_token_id": (config.bos_token_id, tokenizer.bos_token_id),
            "pad_token_id": (config.pad_token_id, tokenizer.pad_token_id),
            "boi_token_id": (extra.get("boi_token_id"), tokenizer.convert_tokens_to_ids(begin)),
        }
        special: dict[str, int] = {}
        for name, (configured, fallback) in candidates.items():
            if (token := fallback if configured is None else configured) is None:
                raise InputError(
                    f"neither the model's generation_config nor its tokenizer tells {name}; "
                    f"expected the model's own. Set model.generation_config.{name}."
                )
            special[name.partition("_")[0]] = int(token)
        return janus_unconditional(ids, **special)

    def _check_negative(self) -> None:
        raise InputError(
            "got a negative prompt; Janus is guided away from its own prompt with padding for "
            "words, as it was trained. Leave negative_prompt out."
        )
