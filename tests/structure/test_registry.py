"""The registry: each entry can be imported, and a misspelt name suggests the nearest."""

import pytest

from ragspec.drafters.method import Method
from ragspec.errors import UnknownNameError
from ragspec.registry import NAMES, did_you_mean, resolve, unknown
from ragspec.visual.families.base import Family

ENTRIES = [(kind, name) for kind, table in NAMES.items() for name in table]


@pytest.mark.parametrize(("kind", "name"), ENTRIES)
def test_each_entry_is_a_class_or_a_method(kind: str, name: str) -> None:
    result = resolve(kind, name)
    assert isinstance(result, type | Method if kind == "drafter" else type)
    if kind == "rule":
        assert vars(result)["name"] == name
    elif kind == "family":
        assert issubclass(result, Family) and result.kind
    else:
        method: Method = resolve(kind, name).method
        assert method.drafts_from and method.paper
        assert isinstance(result, type) or method.make is not None


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("drafter", "contxt", r"'contxt'\. Did you mean 'context'"),
        ("drafter", "Context", r"'Context'\. Did you mean 'context'"),
        ("drafter", "sufix", r"'sufix'\. Did you mean 'suffix'"),
        ("rule", "wlk", r"unknown rule 'wlk'\. Did you mean 'walk'"),
        ("rule", "xyzzy", r"'xyzzy'\. Known: .*walk"),
        ("drafters", "context", "Did you mean 'drafter'"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(kind: str, name: str, message: str) -> None:
    with pytest.raises(UnknownNameError, match=message) as caught:
        resolve(kind, name)
    assert isinstance(caught.value, ValueError) and caught.value.exit_code == 2


def test_the_table_cannot_be_changed_from_outside() -> None:
    with pytest.raises(TypeError):
        NAMES["drafter"]["context"] = "x:Y"  # type: ignore[index]


def test_suggestions_keep_the_spelling_of_the_known_name() -> None:
    assert did_you_mean("LLAMA", ["Llama", "gpt"]) == " Did you mean 'Llama'?"
    assert did_you_mean("q", ["Llama"]) == ""
    assert unknown("thing", "b", ["c", "a"]).endswith("Known: a, c.")
