"""Names for the types of transformers in signatures, as its import takes a second."""

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import transformers

BaseStreamer: TypeAlias = "transformers.generation.BaseStreamer"
Cache: TypeAlias = "transformers.Cache"
GenerationConfig: TypeAlias = "transformers.GenerationConfig"
ModelOutput: TypeAlias = "transformers.utils.ModelOutput"
PreTrainedConfig: TypeAlias = "transformers.PreTrainedConfig"
PreTrainedModel: TypeAlias = "transformers.PreTrainedModel"
Tokenizer: TypeAlias = "transformers.PreTrainedTokenizerBase"
