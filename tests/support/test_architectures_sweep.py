"""Every causal model type of transformers: refused, or right with drafts and without."""

import pytest

from tests.support import architectures_sweep as sweep
from tests.support.architectures_sweep import examine, model_types

SHARE = 0.1  # of the types that may be beyond what the sweep can build

# Types that earlier versions refused, decoded wrongly or slowly.
MODES = {
    "arcee": "tree",
    "bloom": "chain",
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
    "gemma3n_text": "tree",  # some of its layers hold no keys
    "bigbird_pegasus": "chain",
    "deepseek_v4": "chain",  # its cache holds compressed keys
    "glm_moe_dsa": "chain",  # its cache holds an index
    "openai-gpt": "refused",
    "moshi": "refused",
    "zamba2": "refused",  # its single steps differ from its forwards over several tokens
}


@pytest.mark.parametrize("model_type", MODES)
def test_types_outside_the_list_of_architectures(model_type: str) -> None:
    result = examine(model_type)
    assert result.mode == MODES[model_type], result.reason
    assert result.right, result
    assert result.accepted > 0 or result.mode == "refused"


def test_models_that_are_not_tiny_are_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "MOST_WEIGHTS", 100)
    result = examine("arcee")
    assert result.mode == "not built"
    assert "which is not tiny" in result.reason
    assert examine("no such type").mode == "not built"


@pytest.mark.slow
def test_every_type_is_right_or_refused_and_nearly_every_one_is_built() -> None:
    findings = [examine(name) for name in model_types()]
    assert not [found for found in findings if not found.right]
    missing = [found for found in findings if found.mode == "not built"]
    assert len(missing) < SHARE * len(findings), missing
