"""Files of draft heads: a published layout is recognised, read whole, and written back.

Layouts are EAGLE's own (`eagle`), that of vLLM's `speculators` (`speculators`), those of DFlash
(`dflash`), Medusa and Hydra (`medusa`), and the layers for multi-token prediction inside a model's
checkpoint (`mtp`).
"""

import json
import shutil
from pathlib import Path

import torch

from ragspec.drafters.heads import dflash, eagle, medusa, mtp, speculators
from ragspec.drafters.heads.checkpoint import Checkpoint, refuse_damage
from ragspec.drafters.heads.config import HeadWeights
from ragspec.drafters.heads.head import DraftHead, check_head
from ragspec.drafters.heads.parallel import MedusaHead, unset_head
from ragspec.errors import InputError, ModelError, StoreError, UnsupportedModelError
from ragspec.models.block_linear import BLOCK, in_blocks
from ragspec.models.checks import CONFIG, DTYPES, WEIGHTS
from ragspec.verification.causal import CausalTarget

LAYOUTS = (speculators, medusa, dflash, eagle, mtp)
_FLOATS = {str(each): each for each in (torch.float64, torch.float32, torch.bfloat16, torch.half)}


def holds_head(folder: Path) -> bool:
    """Return whether a folder has a head, in one of the layouts."""
    try:
        with refuse_damage(folder):
            checkpoint = Checkpoint.open(folder)
            return any(layout.matches(checkpoint) for layout in LAYOUTS)
    except ModelError:
        return False


def open_head(folder: Path | str, target: CausalTarget | None = None) -> DraftHead:
    """Return the head in a folder, in float32; see `read_head`.

    Args:
        target: The model that it was trained for, which is checked.
    """
    head = head_of(read_head(folder, target), folder)
    if target is not None:
        check_head(head.config, target)
    return head


def head_of(weights: HeadWeights, folder: Path | str) -> DraftHead:
    """Return the head with these weights, all of which it must take.

    Raises:
        ModelError: A tensor is missing, left over or of another size, in that folder.
    """
    with refuse_damage(folder):
        if (layers := weights.config.layers.get("num_hidden_layers", 0)) > len(weights.state):
            raise ValueError(f"num_hidden_layers is {layers}, with {len(weights.state)} tensors")
        with torch.device("meta"):  # compares sizes, for which there may be no memory
            unset_head(weights.config).load_state_dict(weights.state, assign=True)
        head = unset_head(weights.config)
        head.load_state_dict(weights.state)
        return head.eval()


def read_head(folder: Path | str, target: CausalTarget | None = None) -> HeadWeights:
    """Return the configuration and the tensors of the head in a folder, in float32.

    Args:
        target: Without it a head of EAGLE-3 whose file names no taps is refused.

    Raises:
        MissingModelError: The folder has no head.
        ModelError: The files are damaged.
        UnsupportedModelError: The layout is unknown, or the weights are quantised.
    """
    with refuse_damage(folder):
        checkpoint = Checkpoint.open(folder)
        for layout in LAYOUTS:
            if layout.matches(checkpoint):
                head: HeadWeights = layout.read(checkpoint, target)
                return head
    names = ", ".join(sorted(checkpoint.names)[:4])
    raise UnsupportedModelError(
        f"{folder} has tensors such as {names or '(none)'}; expected a head of EAGLE, "
        "`speculators`, DFlash, Medusa, Hydra or MTP layers. Use a head of one of these layouts."
    )


def save_head(head: DraftHead, folder: Path | str, dtype: torch.dtype | str | None = None) -> None:
    """Write a head to a folder, in the layout that other engines read.

    EAGLE-1, Medusa and Hydra go into their own layouts, the others into that of `speculators`.

    Args:
        dtype: Dtype of the saved weights, or its name; None for their own. "int8" stores matrices
            in 8 bits, which only ragspec reads, and the rest in bfloat16.

    Raises:
        InputError: The dtype is none of these.
        ModelError: The weights are not finite.
        StoreError: The files cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder = Path(folder)
    alone = medusa if isinstance(head, MedusaHead) else speculators
    layout = eagle if head.config.form == "eagle1" else alone
    config, weights = layout.to_layout(head)
    small, name = dtype == "int8", str(dtype).removeprefix("torch.")
    if not (dtype is None or small or name in DTYPES):
        raise InputError(f"Expected int8, {', '.join(DTYPES)} as dtype, got {dtype!r}. Use one.")
    kind = torch.bfloat16 if small else _FLOATS.get(f"torch.{DTYPES.get(name)}")
    tensors = dict[str, torch.Tensor]()
    for name, value in weights.items():
        value = value.detach()
        if small and value.is_floating_point() and value.ndim == 2 and value.shape[1] % BLOCK == 0:
            codes, scales = in_blocks(value.float(), dtype=torch.float16)
            stem = name.removesuffix("weight")
            tensors |= {f"{stem}codes": codes, f"{stem}scales": scales}
        else:
            tensors[name] = value.to(dtype=kind if value.is_floating_point() else None).contiguous()
    if odd := [name for name, each in tensors.items() if not each.isfinite().all()]:
        raise ModelError(
            f"got a head with infinities or NaN in {odd[0]} as {tensors[odd[0]].dtype}; expected "
            "finite weights. Train it at a lower rate, or save it in another dtype."
        )
    form = head.config
    about: dict[str, object] = {"target": form.target, "vocab_size": form.vocab_size}
    about |= {"feeds_norm": form.feeds_norm, "taps": form.taps}
    text = json.dumps(config | {"ragspec": about}, indent=2)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(text + "\n", encoding="utf-8")
        shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # `save_file` writes for the owner alone
    except (OSError, SafetensorError) as error:  # the latter for a full disk
        raise StoreError(
            f"the head cannot be written to {folder} ({error}); expected a disk with room."
        ) from error
