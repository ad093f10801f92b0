"""Every causal model type of transformers: refused, or right with drafts and without."""

from __future__ import annotations

import pytest

from ragspec.verification.causal import CausalTarget
from ragspec.verification.probe import Probed, ProbeVerdict
from tests.support import architectures_sweep as sweep
from tests.support.architectures_sweep import Finding, examine, main, model_types, table

SHARE = 0.1  # of the types that may be beyond what the sweep can build

# What was refused, wrong or slow once and need not have been.
MODES = {
    "arcee": "tree",
    "bart": "chain",  # its last token is forced; it counts positions itself, as the next ones do
    "blenderbot": "chain",
    "blenderbot-small": "chain",
    "marian": "chain",
    "mbart": "chain",
    "pegasus": "chain",
    "camembert": "tree",
    "data2vec-text": "tree",
    "roberta": "tree",
    "roberta-prelayernorm": "tree",
    "xlm-roberta": "tree",
    "xlm-roberta-xl": "tree",
    "doge": "tree",
    "bigbird_pegasus": "chain",
    "deepseek_v4": "chain",  # its cache holds compressed keys
    "glm_moe_dsa": "chain",  # its cache holds an index
    "openai-gpt": "refused",
    "moshi": "refused",
    "zamba2": "refused",  # its single steps say something else than its forwards over several
}


@pytest.mark.parametrize("model_type", MODES)
def test_types_outside_the_list_of_architectures(model_type: str) -> None:
    result = examine(model_type)
    assert result.mode == MODES[model_type], result.reason
    assert result.right, result
    assert result.accepted > 0 or result.mode == "refused"


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("bigbird_pegasus", "takes no position_ids"),
        ("deepseek_v4", "more than keys and values (DeepseekV4"),
        ("glm_moe_dsa", "more than keys and values (DynamicIndexedLayer)"),
    ],
)
def test_the_reason_against_trees_is_that_of_the_model(model_type: str, reason: str) -> None:
    assert reason in examine(model_type).reason


@pytest.fixture
def believing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every model for one that verifies trees."""

    def believe(target: CausalTarget) -> Probed:
        return Probed(target, ProbeVerdict("tree", "", 0.0, 0.0, 0))

    monkeypatch.setattr(sweep, "probe_target", believe)


@pytest.mark.usefixtures("believing")
def test_a_wrong_text_is_visible(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["llama", "whisper"]) == 1
    llama, whisper, total = capsys.readouterr().out.splitlines()[2:]
    assert whisper.split()[:2] == ["whisper", "tree"]
    assert "DIFFERS" in whisper and "DIFFERS" not in llama
    assert total == "2 types: 2 tree; 1 wrong"


def test_what_is_not_tiny_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "MOST_WEIGHTS", 100)
    result = examine("arcee")
    assert result.mode == "not built"
    assert "which is not tiny" in result.reason
    assert examine("no such type").mode == "not built"


def test_the_table_says_what_is_wrong() -> None:
    lines = table([Finding("a", "tree", plain=False), Finding("b", "refused", "no\nroom")])
    head, _, first, second, total = lines.splitlines()
    assert head.split()[:4] == ["type", "verifies", "plain", "drafted"]
    assert first.split() == ["a", "tree", "DIFFERS", "equal", "0"]
    assert second.split() == ["b", "refused", "no", "room"]
    assert total == "2 types: 1 tree, 1 refused; 1 wrong"


# --- all of them: with every new release of transformers ------------------------------------------


@pytest.fixture(scope="module")
def findings() -> dict[str, Finding]:
    return {model_type: examine(model_type) for model_type in model_types()}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", model_types())
def test_every_type_is_right_or_refused(model_type: str, findings: dict[str, Finding]) -> None:
    result = findings[model_type]
    if result.mode == "not built":
        pytest.skip(result.reason)
    assert result.right, result


@pytest.mark.slow
def test_nearly_every_type_is_built(findings: dict[str, Finding]) -> None:
    missing = {
        name: result.reason for name, result in findings.items() if result.mode == "not built"
    }
    assert len(missing) < SHARE * len(findings), missing
