"""Layers for multi-token prediction are read from checkpoints as transformers would run them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ragspec.drafters.heads.files import open_head, save_head
from tests.support import architectures, heads
from tests.support.published_heads import sines, write

PARTS = ("fc", "token", "state", "norm", "layer")
BEHIND = "model.layers.2.", ("eh_proj", "enorm", "hnorm", "shared_head.norm", "")
NAMES = {  # the prefix of a kind, and what it calls the parts
    "deepseek_v3": BEHIND,
    "glm4_moe_lite": BEHIND,
    "qwen3_next": (
        "mtp.",
        ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "layers.0."),
    ),
    "mimo": (
        "model.mtp_layers.0.",
        ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm", ""),
    ),
}
H = 32


class Reference:
    """A layer of the target's class between norms and a projection, run by transformers."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.model = architectures.build("qwen2" if kind == "mimo" else kind)
        decoder = self.model.get_decoder()
        self.number = len(decoder.layers) - 1
        self.layer = type(decoder.layers[-1])(decoder.config, self.number)
        norm, eps = type(decoder.norm), decoder.config.rms_norm_eps
        self.norms = {name: norm(H, eps=eps) for name in ("token", "state", "norm")}
        self.fc = nn.Linear(2 * H, H, bias=False)
        with torch.no_grad():
            for name, weight in self._parameters().items():
                weight.copy_(sines(name, *weight.shape))
        self.layer.eval()

    def _parameters(self) -> dict[str, torch.Tensor]:
        parts: dict[str, nn.Module] = {**self.norms, "fc": self.fc, "layer": self.layer}
        return {
            f"{part}.{name}": weight
            for part, module in parts.items()
            for name, weight in module.state_dict().items()
        }

    def save(self, folder: Path) -> Path:
        """Write the checkpoint, with the experts one by one as published."""
        prefix, called = NAMES[self.kind]
        names = dict(zip(PARTS, called, strict=True))
        tensors = {"model.norm.weight": torch.ones(H)}
        tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.ones(1)  # not of this layer
        for name, weight in self._parameters().items():
            part, _, rest = name.partition(".")
            key = prefix + names[part] + (rest if part == "layer" else f".{rest}")
            base, _, last = key.rpartition(".")
            if last == "gate_up_proj":
                for i, expert in enumerate(weight):
                    gate, up = expert.chunk(2)
                    tensors[f"{base}.{i}.gate_proj.weight"] = gate
                    tensors[f"{base}.{i}.up_proj.weight"] = up
            elif last == "down_proj" and weight.dim() == 3:
                tensors |= {f"{base}.{i}.down_proj.weight": each for i, each in enumerate(weight)}
            else:
                tensors[key] = weight
        config = self.model.config.to_dict()
        config |= {"model_type": "mimo"} if self.kind == "mimo" else {}
        kept = {name: each.detach().clone() for name, each in tensors.items()}
        return write(folder, config, kept)

    @torch.no_grad()
    def __call__(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the normed output after each pair."""
        pair = [self.norms["token"](embedded), self.norms["state"](states)]
        hidden = self.fc(torch.cat(pair[::-1] if self.kind == "mimo" else pair, -1))
        places = torch.arange(embedded.shape[1])[None]
        tables = self.model.get_decoder().rotary_emb(hidden, places)
        n = embedded.shape[1]
        mask = torch.full((1, 1, n, n), -torch.inf).triu(1)
        out = self.layer(
            hidden, attention_mask=mask, position_embeddings=tables, position_ids=places
        )
        normed: torch.Tensor = self.norms["norm"](out[0] if isinstance(out, tuple) else out)
        return normed


@pytest.mark.parametrize("kind", NAMES)
def test_a_layer_computes_what_the_targets_class_does(kind: str, tmp_path: Path) -> None:
    reference = Reference(kind)
    head = open_head(reference.save(tmp_path / "model"))
    embedded, states = sines("embedded", 1, 7, H) * 3.0, sines("states", 1, 7, H) * 5.0
    result = head(embedded, states)
    expected = reference(embedded, states)
    torch.testing.assert_close(result.read, expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(result.fed, result.read) is (NAMES[kind] is not BEHIND)
    save_head(head, tmp_path / "again")
    torch.testing.assert_close(open_head(tmp_path / "again")(embedded, states).fed, result.fed)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe_lite", "mimo"])
def test_texts_stay_as_they_are(kind: str, temperature: float, tmp_path: Path) -> None:
    reference = Reference(kind)
    folder = reference.save(tmp_path)
    _, results = heads.check_texts(reference.model, folder, temperature)
    assert all(result.report.drafted_by_source["head"] > 0 for result in results)


def test_further_layers_are_reported(tmp_path: Path) -> None:
    folder = Reference("mimo").save(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    first = {name: each for name, each in tensors.items() if "mtp_layers.0" in name}
    tensors |= {
        name.replace("mtp_layers.0", "mtp_layers.1"): each.clone() for name, each in first.items()
    }
    save_file(tensors, folder / "model.safetensors")
    with pytest.warns(UserWarning, match="more than one layer"):
        open_head(folder)
