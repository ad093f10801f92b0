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

TEMPLATE = "<|User|>: {prompt}\n\n<|Assistant|>:"  # the published one, where the tokenizer has none


class JanusPipeline(PromptPipeline):
    """Draws with a `JanusForConditionalGeneration`; see `PromptPipeline`.

    A prompt is put as a user's message into the chat template, before the begin-of-image token.
    Guidance leads away from the same prompt with padding in place of its words, so that there is
    no negative prompt. An image has the codes that the model was trained on, laid out in their
    square or in any grid of no more of them.
    """

    kind = "janus"
    target_kind = JanusTarget
    guidance = 5.0

    def _vq(self, model: Any, vq: Any) -> Any:
        if vq is not None:
            raise InputError("got vq for Janus, which has a decoder of its own; leave it out.")
        return JanusVQ(model.model.vqmodel)

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
        # Templates of processors read parts of a message, those of tokenizers a text.
        parts = "'text'" in chat or '"text"' in chat or ".text" in chat
        content: Any = [{"type": "text", "text": prompt}] if parts else prompt
        text: str = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        return text

    def _nothing(self, ids: list[int], raster: Raster) -> list[int]:
        request = self.model.generation_config
        begin = mark(self.text_tokenizer, "boi_token", "<begin_of_image>")
        known = {
            "bos_token_id": request.bos_token_id,
            "pad_token_id": request.pad_token_id,
            "boi_token_id": (request.generation_kwargs or {}).get("boi_token_id")
            if hasattr(request, "generation_kwargs")
            else None,
        }
        spare = {
            "bos_token_id": self.text_tokenizer.bos_token_id,
            "pad_token_id": self.text_tokenizer.pad_token_id,
            "boi_token_id": self.text_tokenizer.convert_tokens_to_ids(begin),
        }
        record = {
            name: spare[name] if message is None else message for name, message in known.items()
        }
        lacking = [name for name, message in record.items() if message is None]
        if lacking:
            raise InputError(
                f"neither the model's generation_config nor its tokenizer tells {lacking[0]}; "
                f"expected the model's own. Set model.generation_config.{lacking[0]}."
            )
        bos, pad, boi = record["bos_token_id"], record["pad_token_id"], record["boi_token_id"]
        return janus_unconditional(ids, int(bos), int(boi), int(pad))

    def _check_negative(self) -> None:
        raise InputError(
            "got a negative prompt; Janus is guided away from its own prompt with padding for "
            "words, as it was trained. Leave negative_prompt out."
        )
