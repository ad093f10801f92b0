"""Janus and Janus-Pro (arXiv 2410.13848, 2501.17811)."""

from typing import Any, cast

import torch
from torch import Tensor

from ragspec.errors import InputError
from ragspec.types import PreTrainedModel
from ragspec.visual.families.multimodal import Ids, MultimodalTarget, PromptFamily, mark, text_ids
from ragspec.visual.models.raster import Raster, square
from ragspec.visual.models.vq import JanusVQ

TEMPLATE = "<|User|>: {prompt}\n\n<|Assistant|>:"  # published; used without a chat template


class JanusTarget(MultimodalTarget):
    """Janus or Janus-Pro (`JanusForConditionalGeneration`) as a target.

    Args:
        prompts: Token ids that end with the begin-of-image token.
        unconditional: The same ids with padding in place of the text, see `Janus`.
    """

    kind = "janus"

    @staticmethod
    def parts_of(model: PreTrainedModel) -> tuple[PreTrainedModel, Ids]:
        """Return the language model, and the codes."""
        return model.model.language_model, range(model.model.generation_embeddings.num_embeddings)

    @property
    def output_head(self) -> torch.nn.Module:
        """The head for codes, which is not the one for text."""
        return cast(torch.nn.Module, self.model.model.generation_head)

    def code_embeddings(self, codes: Tensor) -> Tensor:
        """Return codes i64 [B, n] embedded and projected to the text's space, [B, n, hidden]."""
        return torch.as_tensor(self.model.prepare_embeddings_for_image_generation(codes))


class Janus(PromptFamily):
    """A `JanusForConditionalGeneration`; see `PromptFamily`.

    The chat template takes the prompt as a user message; the begin-of-image token follows it.
    Guidance leads away from the same prompt with padding in place of its words, so Janus takes no
    negative prompt.
    """

    kind = "janus"
    model_class = "JanusForConditionalGeneration"
    target = JanusTarget
    decoder_class = JanusVQ
    guidance = 5.0
    unsupported = {  # noqa: RUF012
        "negative_prompt": "Janus is guided away from its own prompt with padding for words, as it "
        "was trained. Leave negative_prompt out."
    }

    def usual_raster(self) -> Raster:
        """Return the square that the model was trained on."""
        return square(int(self.model.config.vision_config.num_image_tokens))

    def ids(self, text: str, raster: Raster) -> list[int]:
        """Return the token ids of a text in the chat template and the begin of an image."""
        begin = mark(self.text_tokenizer, "boi_token", "<begin_of_image>")
        return text_ids(self.text_tokenizer, self._in_template(text) + begin, begin)

    def _in_template(self, prompt: str) -> str:
        chat = getattr(self.tokenizer, "chat_template", None)
        if chat is None:
            return TEMPLATE.replace("{prompt}", prompt.strip())
        # A processor's template reads a list of parts, a tokenizer's template reads a string.
        parts = "'text'" in chat or '"text"' in chat or ".text" in chat
        content: Any = [{"type": "text", "text": prompt}] if parts else prompt
        turns = [{"role": "user", "content": content}]
        options = {"tokenize": False, "add_generation_prompt": True}
        return str(self.tokenizer.apply_chat_template(turns, **options))

    def unconditional(self, ids: list[int], raster: Raster) -> list[int]:
        """Return the prompt with padding in place of its words."""
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
            special[name] = int(token)
        padding = special.pop("pad_token_id")
        return [token if token in special.values() else padding for token in ids]
