"""The table of names: resolves strings such as `drafter="context"` to classes.

Only this module of the core names the rooms. The strings are imported on first use.
"""

import difflib
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import lazy_loader

from ragspec.errors import InputError, MissingExtraError, UnknownNameError

# The packages of each extra.
_PACKAGES = {
    "rag": ("sentence_transformers", "lxml", "pypdfium2", "charset_normalizer", "faiss"),
    "office": ("docx", "pptx", "openpyxl"),
    "images": ("diffusers", "PIL"),
    "data": ("datasets", "pyarrow"),
    "gguf": ("gguf",),
    "adapters": ("peft",),
    "onnx": ("onnx", "onnxruntime"),
    "serve": ("fastapi", "uvicorn", "h11", "prometheus_client"),
    "ray": ("ray",),
    "langchain": ("langchain_core",),
    "llamaindex": ("llama_index",),
    "haystack": ("haystack",),
    "lm-eval": ("lm_eval",),
}
# Optional package -> the extra that installs it.
EXTRAS = MappingProxyType({each: extra for extra, names in _PACKAGES.items() for each in names})

_NAMES = {
    "drafter": {
        "context": "ragspec.retrievers.methods.context:ContextDrafter",
        "lookup": "ragspec.retrievers.methods.prompt_lookup:LookupDrafter",
        "match": "ragspec.retrievers.methods.sam_decoding:MatchDrafter",
        "suffix": "ragspec.retrievers.methods.suffix_decoding:SuffixDrafter",
        "recycling": "ragspec.retrievers.methods.token_recycling:NeighbourDrafter",
        "next-tokens": "ragspec.retrievers.methods.next_tokens:NextTokenDrafter",
        "rest": "ragspec.retrievers.corpus.rest:RestDrafter",
        "select": "ragspec.retrievers.methods.sam_decoding:Select",
        "hierarchy": "ragspec.retrievers.methods.hierarchy_drafting:HierarchyDrafter",
        "rasd": "ragspec.retrievers.methods.rasd:Rasd",
        "rapid": "ragspec.retrievers.methods.rapid:Rapid",
        "auto": "ragspec.retrievers.methods.auto:AutoDrafter",
        "model": "ragspec.drafters.model.drafter:ModelDrafter",
        "fused": "ragspec.drafters.model.drafter:FUSED",
        "head": "ragspec.drafters.heads.drafter:HeadDrafter",
        "jacobi": "ragspec.visual.drafting.jacobi:JacobiDrafter",
        "ngrams": "ragspec.retrievers.methods.ngrams:NGramDrafter",
    },
    "rule": {
        "walk": "ragspec.rules.walk:Walk",
        "rejection": "ragspec.rules.rejection:ChainRejection",
        "multi-step": "ragspec.rules.rejection:MultiStep",
        "without-replacement": "ragspec.rules.rejection:WithoutReplacement",
        "k-seq": "ragspec.rules.k_seq:KSeq",
        "block": "ragspec.rules.block_verification:Block",
        "typical": "ragspec.rules.typical:Typical",
        "lantern": "ragspec.visual.rules.lantern:Lantern",
        "lantern++": "ragspec.visual.rules.lantern:LanternPlus",
        "gsd": "ragspec.visual.rules.lantern:GSD",
    },
    "family": {
        "llamagen": "ragspec.visual.families.llamagen:LlamaGen",
        "janus": "ragspec.visual.families.janus:Janus",
        "emu3": "ragspec.visual.families.emu3:Emu3",
        "chameleon": "ragspec.visual.families.chameleon:Chameleon",
        "imagegpt": "ragspec.visual.families.imagegpt:ImageGPT",
        "latents": "ragspec.visual.families.latents:Latents",
        "mar": "ragspec.visual.families.mar:Mar",
    },
}
NAMES = MappingProxyType({kind: MappingProxyType(table) for kind, table in _NAMES.items()})
GROUPS = MappingProxyType(
    {"drafter": "ragspec.drafters", "rule": "ragspec.rules", "family": "ragspec.families"}
)
# An attribute that the objects of each kind have.
_MEMBERS = {"drafter": "method.drafts_from", "rule": "relaxed_by", "family": "kind"}


def names(kind: str) -> Mapping[str, str]:
    """Return the names of a kind, each with its object as "module:attribute".

    Other packages add names by entry points in the groups `ragspec.drafters`, `ragspec.rules` and
    `ragspec.families`. If a name exists here too, it wins over the entry point, with a warning.

    Args:
        kind: "drafter", "rule" or "family".

    Raises:
        UnknownNameError: There is no such kind.
    """
    expect_known("kind of name", [kind], NAMES)
    outside = dict(_entry_points(GROUPS[kind], tuple(sys.path)))
    for name in sorted(outside.keys() & NAMES[kind].keys()):
        warnings.warn(
            f"Expected a new name in the entry points {GROUPS[kind]}, got {name!r}, which ragspec "
            f"has: {outside[name]} is ignored. Rename it.",
            stacklevel=2,
        )
    return {**outside, **NAMES[kind]} if outside else NAMES[kind]


@lru_cache(maxsize=8)
def _entry_points(group: str, path: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return the entry points of a group. The search path is only a key of the cache."""
    from importlib.metadata import entry_points  # slow: most of the time of `import ragspec`

    return tuple((point.name, point.value) for point in entry_points(group=group))


def resolve(kind: str, name: str) -> Any:
    """Return the object of a name, in most cases a class.

    Args:
        kind: "drafter", "rule" or "family".
        name: One of `names(kind)`.

    Raises:
        UnknownNameError: There is no such name. The message suggests the nearest ones.
        MissingExtraError: The object needs a package that is not installed.
        InputError: The entry point of another package leads to no object of this kind.
    """
    table = names(kind)
    expect_known(kind, [name], table)
    module, _, attribute = table[name].partition(":")
    try:
        with optional_packages():
            result = getattr(import_module(module), attribute)
            attrgetter(_MEMBERS[kind])(result)
    except Exception as error:
        if name in NAMES[kind] or isinstance(error, MissingExtraError):
            raise
        raise InputError(
            f"Expected a {kind} with {_MEMBERS[kind]} in the entry points {GROUPS[kind]}, got "
            f"{name} = {table[name]}: {error}. Correct its package, or uninstall it."
        ) from error
    return result


def entries(kind: str, among: Iterable[str] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield names, by default all, with their objects; skip broken entry points with a warning."""
    for name in names(kind) if among is None else among:
        try:
            yield name, resolve(kind, name)
        except (InputError, MissingExtraError) as error:
            if name in NAMES[kind]:
                raise
            warnings.warn(f"{error} The {kind} is skipped.", stacklevel=2)


def expect_known(kind: str, names: Iterable[str], choices: Collection[str]) -> None:
    """Raise UnknownNameError for the first name that is no choice."""
    for name in names:
        if name not in choices:
            raise UnknownNameError(unknown(kind, name, choices))


def unknown(kind: str, name: str, choices: Iterable[str]) -> str:
    """Return the error message for an unknown name, with suggestions and all choices."""
    names = sorted(choices)
    hint = did_you_mean(name, names)
    return f"unknown {kind} {name!r}.{hint} Known: {', '.join(names) or 'none'}."


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return " Did you mean 'x' or 'y'?" with the nearest choices, "" if none is near."""
    lowered = {choice.lower(): choice for choice in sorted(choices) if choice != name}
    near = difflib.get_close_matches(name.lower(), lowered, n=2, cutoff=0.6)
    hint = " or ".join(repr(lowered[each]) for each in near)
    return f" Did you mean {hint}?" if hint else ""


def for_extra(error: ModuleNotFoundError) -> ImportError:
    """Return the error that names the extra to install, or `error` itself if no extra does."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return error
    return MissingExtraError(
        f"this needs the package {package}, which is not installed. Install it: pip install "
        f"'ragspec[{EXTRAS[package]}]'."
    )


@contextmanager
def optional_packages() -> Iterator[None]:
    """Raise MissingExtraError in place of ModuleNotFoundError for a package of an extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise for_extra(error) from error


def lazy_exports(
    package: str, file: str
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package with a stub beside it.

    The stub (`__init__.pyi`) is the only list of public names. Type checkers read it, and each
    name is imported on first use.
    """
    attach, listing, exported = lazy_loader.attach_stub(package, file)

    def get(name: str) -> object:
        with optional_packages():
            return attach(name)

    return get, listing, exported
