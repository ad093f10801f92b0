"""Checks of numbers, settings, class labels and images that users pass.

Those of settings need no torch, so that a wrong one is named before a model is loaded.
"""

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from math import inf, isqrt
from types import MappingProxyType
from typing import TYPE_CHECKING

from ragspec.errors import InputError, ModelError
from ragspec.registry import NAMES, entries, expect_known, names
from ragspec.sampling.settings import is_number, whole

if TYPE_CHECKING:
    import torch

EXACT = "exact"  # the name of the walk for images
# The settings of relaxed rules; the first one determines how far a rule of codes relaxes.
RULE_SETTINGS = MappingProxyType(
    {
        "lantern": ("delta", "neighbours", "tv_budget", "least_gain"),
        "lantern++": ("lam", "neighbours", "tv_budget", "least_gain"),
        "gsd": ("partition", "tv_budget", "least_gain"),
        **{"near": ("r",), "aligned": (), "horizon": ("s",), "path": ()},
    }
)
LATENT_RULES = ("near", "aligned", "horizon", "path")
# The model_type of models of latents, with the settings of their denoising.
DENOISING = MappingProxyType(
    {
        "ragspec-latents": frozenset({"steps", "floor"}),
        "ragspec-masked-latents": frozenset({"iterations", "steps", "floor", "prefill"}),
    }
)
KINDS = ("llamagen", "janus", "emu3", "chameleon", "imagegpt", *DENOISING)
WHOLE = frozenset({"s", "neighbours", "partition", "steps", "iterations"})
# The values of a setting: from the first number to below the second one.
LIMITS: Mapping[str, tuple[float, float, str]] = MappingProxyType(
    {
        "delta": (0, 1, "a probability mass from 0 to below 1 (lantern++ has a factor, lam)"),
        "lam": (1, inf, "a factor of at least 1 (lantern has a probability mass, delta)"),
        "tv_budget": (0, inf, "a number of at least 0"),
        "least_gain": (0, inf, "a number of codes, 0 or more"),
        "min_expected_gain": (0, inf, "a number of accepted codes, 0 or more"),
        "r": (0, inf, "a distance of 0 or more, such as 0.02"),
        "floor": (0, 1, "a deviation from 0 to below 1, such as 0.1"),
        "guidance_scale": (0, 1e6, "a finite number of 0 or more, below 1e6 (1: no guidance)"),
        "temperature": (0, 1e6, "a finite number of 0 or more, below 1e6"),
        "prefill": (0, 1, "a share of the latents from 0 to below 1, such as 0.05"),
        **dict.fromkeys(WHOLE, (1, inf, "a whole number of at least 1")),
    }
)


def check_setting(name: str, value: object) -> None:
    """Raise InputError if the value of a setting is outside its limits."""
    least, most, expected = LIMITS[name]
    number = whole(value) if name in WHOLE else value if is_number(value) else None
    if number is None or not least <= number < most:
        raise InputError(f"got {name}={value!r}; expected {expected}.")


def check_rule(kind: str | None, rule: str | None, settings: Mapping[str, object]) -> None:
    """Raise an error for a rule, or for settings, that image models of a kind do not have.

    Args:
        kind: The model_type. Families and rules of other packages are not checked.
        rule: Its name; None for the family's usual one.
        settings: Of the rule, of denoising and of drafting, by name.
    """
    for name in LIMITS.keys() & settings.keys():
        check_setting(name, settings[name])
    latents = kind in DENOISING
    rules = LATENT_RULES if latents else (EXACT, *names("rule"))
    rule = rule or ("aligned" if latents else EXACT)
    if kind in KINDS:
        expect_known("latent rule" if latents else "rule", [rule], rules)
    if kind in KINDS and rule in (EXACT, *NAMES["rule"], *LATENT_RULES):
        beside = {*DENOISING.get(str(kind), ()), "min_expected_gain"}
        check_settings(rule, settings.keys() - beside, {*RULE_SETTINGS.get(rule, ())})


def check_drafters(drafters: Sequence[object], mode: str | None, codes: bool = True) -> None:
    """Raise InputError for drafters that do not fit each other, the rule's drafts, or latents."""
    number, names = len(drafters), {each for each in drafters if isinstance(each, str)}
    if {"", "none"} & names:
        raise InputError(
            f"Expected drafter auto, jacobi, model, head or a folder, several joined by +, or none "
            f"by itself, got {'+'.join(map(str, drafters))!r}."
        )
    if number > 1 and not codes:
        raise InputError(f"got {number} drafters of latents; expected one: drafts are chains.")
    if "head" in names and not codes:
        raise InputError(
            "got a draft head for latents, which take none; expected 'jacobi', 'model' or the "
            "folder of a draft model."
        )
    if "jacobi" in names and mode not in ("coupled", "sampled"):  # from the target's own noise
        raise InputError(
            f"got drafter 'jacobi' where {mode} drafts are needed; expected 'model' or 'head'. Use "
            "one of them, another rule, or no tv_budget."
        )


def relaxed() -> dict[str, str]:
    """Return the relaxed rules of codes, each with the setting that determines how far it relaxes.

    The class of a rule of another package declares that setting as `relaxed_by`.
    """
    ours = {name: RULE_SETTINGS.get(name, (None,))[0] for name in NAMES["rule"]}
    others = names("rule").keys() - ours.keys()
    every = ours | {name: each.relaxed_by for name, each in entries("rule", others)}
    return {name: setting for name, setting in every.items() if setting is not None}


def checked_whole(value: object, name: str, least: int, most: int) -> int:
    """Return a whole number as an int; raise InputError unless it is from `least` to `most`."""
    number = whole(value)
    if number is None or not least <= number <= most:
        raise InputError(f"got {name}={value!r}; expected a whole number from {least} to {most}.")
    return number


def class_number(inputs: int | str, names: Sequence[str], count: int) -> int:
    """Return the number of a class that is given by number or by name.

    Args:
        inputs: A number, also as text, or a name, of which the part after a slash may do.
        names: Of all `count` classes in order; empty if the model has none.

    Raises:
        InputError: No class, or more than one, has this name or number.
    """
    if isinstance(inputs, str) and re.fullmatch(r"-?\d{1,18}", inputs.strip()):
        inputs = int(inputs)
    if isinstance(inputs, str):
        label, lower = inputs.strip().lower(), [name.lower() for name in names]
        results = [n for n, name in enumerate(lower) if name == label]
        results = results or [n for n, name in enumerate(lower) if name.endswith(f"/{label}")]
        if len(results) == 1:
            return results[0]
        known = f"expected one of {', '.join(names)}, or a number"
        unnamed = f"this model has no names, expected 0 to {count - 1}"
        raise InputError(f"got the class {inputs[:100]!r}; {known if names else unnamed}.")
    return checked_whole(inputs, "class", 0, count - 1)


def check_images(images: object, channels: int, reduction: int) -> None:
    """Raise InputError unless images are floats [B, C, H, W] in [-1, 1], sides in whole codes.

    Args:
        reduction: Pixels per code or latent along one side.
    """
    import torch

    shape = list(getattr(images, "shape", ()))
    if (
        not isinstance(images, torch.Tensor)
        or not images.is_floating_point()
        or images.ndim != 4
        or shape[1] != channels
        or any(side % reduction or not side for side in shape[2:])
    ):
        raise InputError(
            f"got pictures of {getattr(images, 'dtype', type(images))} with shape {shape}; "
            f"expected a tensor of floats [B, {channels}, H, W] whose sides are multiples of "
            f"{reduction}. For a file or a Pillow image, call diffusers' VaeImageProcessor("
            f"vae_scale_factor={reduction}).preprocess(load_image(image)); load_image heeds EXIF. "
            "Convert 16-bit pictures to 8 bits and fill transparency first."
        )
    # Resampling may exceed the range a little; bytes (0 .. 255) and NaN are mistakes.
    if images.numel() and not bool((images.abs() <= 1.01).all()):
        raise InputError(
            f"got pictures with values from {float(images.min()):g} to {float(images.max()):g}; "
            "expected [-1, 1]. Divide bytes by 127.5, subtract 1."
        )


def bounded(values: "torch.Tensor", most: float = 1.0) -> "torch.Tensor":
    """Return values cut to [-most, most]; infinite ones become NaN, which is an error later."""
    return values.clamp(-most, most) + 0.0 * values


def check_mode(model: "torch.nn.Module") -> None:
    """Raise InputError for a model in training mode, or with layers that drop values at random."""
    from torch.nn.modules.dropout import _DropoutNd

    layers = (each for each in model.modules() if isinstance(each, _DropoutNd) and each.p)
    if model.training or any(layer.training for layer in layers):
        raise InputError(
            f"got a {type(model).__name__} in training mode, which may drop values; expected "
            "evaluation mode. Call model.eval() before drawing."
        )


def check_finite(values: "torch.Tensor", returned: str) -> None:
    """Raise ModelError, which says what returned which values, unless all of them are finite."""
    if not bool(values.isfinite().all()):
        raise ModelError(
            f"{returned} that are not finite; expected numbers. Its weights are damaged, or its "
            "dtype is too narrow: load it in float32."
        )


def side_of(places: int) -> int | None:
    """Return the side of a square of this many places; None if they form no square."""
    side = isqrt(places)
    return side if side and side * side == places else None


def check_settings(rule: str, settings: Iterable[str], allowed: Set[str]) -> None:
    """Raise InputError if the settings of a rule, by name, are not all among those allowed."""
    if foreign := sorted(set(settings) - allowed):
        raise InputError(
            f"rule {rule!r} has no {', '.join(foreign)}; it takes "
            f"{', '.join(sorted(allowed)) or 'no settings'}."
        )
