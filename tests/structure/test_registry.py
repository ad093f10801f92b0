"""The table of names: entries lead somewhere, and a misspelt one says what was meant."""

import pytest

from ragspec.drafters.method import Method, describe
from ragspec.errors import UnknownNameError
from ragspec.registry import NAMES, did_you_mean, resolve, unknown
from ragspec.visual.families.base import Family

ENTRIES = [(kind, name) for kind, table in NAMES.items() for name in table]


@pytest.mark.parametrize(("kind", "name"), ENTRIES)
def test_every_entry_leads_to_a_class_or_a_descriptor(kind: str, name: str) -> None:
    result = resolve(kind, name)
    assert isinstance(result, type | Method if kind == "drafter" else type)
    if kind == "rule":
        assert vars(result)["name"] == name
    elif kind == "family":
        assert issubclass(result, Family) and result.kind
    else:
        method = describe(name)
        assert method.drafts_from and method.paper
        assert isinstance(result, type) or method.make is not None


@pytest.mark.parametrize(
    ("got", "meant"), [("contxt", "context"), ("Context", "context"), ("sufix", "suffix")]
)
def test_a_misspelt_name_is_answered_with_the_nearest(got: str, meant: str) -> None:
    with pytest.raises(UnknownNameError, match=f"Did you mean '{meant}'") as caught:
        resolve("drafter", got)
    assert repr(got) in str(caught.value)


def test_a_name_near_nothing_gets_the_list_and_no_guess() -> None:
    with pytest.raises(UnknownNameError, match=r"Known: .*walk") as caught:
        resolve("rule", "xyzzy")
    assert "Did you mean" not in str(caught.value)


def test_an_unknown_kind_is_an_unknown_name_too() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'drafter'"):
        resolve("drafters", "context")


def test_an_unknown_name_is_a_value_error_with_the_exit_code_of_bad_input() -> None:
    with pytest.raises(ValueError, match="unknown rule") as caught:
        resolve("rule", "wlk")
    assert isinstance(caught.value, UnknownNameError)
    assert caught.value.exit_code == 2


def test_the_table_cannot_be_changed_from_outside() -> None:
    with pytest.raises(TypeError):
        NAMES["drafter"]["context"] = "x:Y"  # type: ignore[index]


def test_suggestions_keep_the_spelling_of_the_known_name() -> None:
    assert did_you_mean("LLAMA", ["Llama", "gpt"]) == " Did you mean 'Llama'?"
    assert did_you_mean("q", ["Llama"]) == ""
    assert unknown("thing", "b", ["c", "a"]).endswith("Known: a, c.")
