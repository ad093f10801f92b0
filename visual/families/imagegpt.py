"""ImageGPT (Chen et al., 2020), whose codes are clusters of colours, one a pixel."""

import torch
from torch import Tensor

from ragspec.errors import InputError
from ragspec.types import PreTrainedModel
from ragspec.visual.call import ImageCall, ImageConfig
from ragspec.visual.families.base import Family
from ragspec.visual.families.multimodal import Ids, MultimodalTarget
from ragspec.visual.loading import ImageFolder, expect_kind, expect_readable
from ragspec.visual.models.raster import Raster, square
from ragspec.visual.models.vq import CodeBook


class ImageGPTTarget(MultimodalTarget):
    """ImageGPT (`ImageGPTForCausalImageModeling`) as a target; its codes are clusters of colours.

    It has no conditions: its only prompt, `prompt(0)`, is the start token. Its causal mask ends
    with the image: drafts are cut to what fits, and a draft model of this class stops drafting a
    few codes before the end.
    """

    kind = "imagegpt"

    def __init__(self, model: PreTrainedModel) -> None:
        expect_kind(model, self.kind)
        size = int(model.config.n_positions)
        super().__init__(model, [[model.config.vocab_size - 1]], raster=square(size))
        self.max_length = size + 1  # the last code is never an input
        self.max_slots = size

    @staticmethod
    def parts_of(model: PreTrainedModel) -> tuple[PreTrainedModel, Ids]:
        """Return the transformer, and the codes."""
        return model.transformer, range(model.config.vocab_size - 1)


class ColourClusters(CodeBook):
    """The colours [V, 3] of the codes, from -1 to 1, as `ImageGPTImageProcessor` has them."""

    reduction = 1

    def __init__(self, colours: Tensor) -> None:
        self.colours = colours.float()

    def codebook(self) -> Tensor:
        """Return the colours f32 [V, 3]."""
        return self.colours

    def decode(self, codes: Tensor) -> Tensor:
        """Return images f32 [B, 3, H, W] in [-1, 1] of codes, see `grid`."""
        return self.colours[self.grid(codes).cpu()].permute(0, 3, 1, 2)


class ImageGPT(Family):
    """An `ImageGPTForCausalImageModeling` with its image processor; it draws without conditions.

    A call takes neither prompt nor class, and draws num_images_per_prompt images.
    """

    kind = "imagegpt"
    model_class = "ImageGPTForCausalImageModeling"
    guidance = 1.0
    unsupported = {  # noqa: RUF012
        "codes": "expected none: ImageGPT draws whole images.",
        "guidance_interval": "expected none: ImageGPT has no conditions.",
        "guidance_scale": "expected none: ImageGPT has no conditions.",
    }
    condition = None

    def __init__(
        self, model: PreTrainedModel, tokenizer: object, folder: ImageFolder | None = None
    ) -> None:
        super().__init__(model, tokenizer, folder)
        clusters = getattr(tokenizer, "clusters", None)
        codes = int(model.config.vocab_size) - 1
        if clusters is None or len(clusters) != codes:
            raise InputError(
                f"got the tokenizer {type(tokenizer).__name__}; expected the "
                f"ImageGPTImageProcessor of the model, with {codes} clusters of colours."
            )
        self.codec = ColourClusters(torch.as_tensor(clusters))
        self.raster = square(int(model.config.n_positions))

    @classmethod
    def load_tokenizer(cls, folder: ImageFolder) -> object:
        """Return the image processor of a folder as transformers writes it."""
        from transformers import ImageGPTImageProcessor

        expected = "preprocessor_config.json with the clusters of colours. Copy it there."
        with expect_readable(f"{folder.target} holds no image processor", expected):
            return ImageGPTImageProcessor.from_pretrained(folder.target)

    def conditions(self, call: ImageCall, raster: Raster) -> tuple[None]:
        """Return one condition, that of nothing."""
        return (None,)

    def open(
        self, model: PreTrainedModel, conditions: object, config: ImageConfig
    ) -> ImageGPTTarget:
        """Return an `ImageGPTTarget`."""
        return ImageGPTTarget(model)
