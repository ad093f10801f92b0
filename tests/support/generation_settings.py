"""Every setting of transformers that makes a logits processor, with a value that changes texts.

The texts are those of `tests.tiny`'s llama after the two prompts of `PROMPTS`, greedy.
"""

import inspect
import re
from functools import cache
from typing import Any

import torch

from tests.support import tiny

PROMPTS = [[5, 6, 7, 8, 9, 5], [40, 41, 3]]
PAD = 96
NEW = 12
# Attributes that transformers' factory of processors reads beside the settings.
_BESIDE = "use_cache _eos_token_tensor num_beams num_return_sequences max_length do_sample"
BESIDE = {*_BESIDE.split()}


def padded(prompts: list[list[int]]) -> dict[str, Any]:
    """Return the prompts as one batch, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), PAD)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(prompts):
        ids[row, longest - len(tokens) :] = torch.tensor(tokens)
        mask[row, longest - len(tokens) :] = 1
    return {"input_ids": ids, "attention_mask": mask}


@cache
def plain() -> list[list[int]]:
    """Return the greedy texts that no setting has changed."""
    out = tiny.model("llama").generate(
        **padded(PROMPTS), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=PAD
    )
    return [row[len(PROMPTS[0]) :].tolist() for row in out]


def greedy() -> dict[str, dict[str, Any]]:
    """Return settings that act on greedy text, too, and what each of them needs beside it."""
    from transformers import SynthIDTextWatermarkingConfig, WatermarkingConfig

    one, two = plain()
    ends: dict[str, Any] = {"eos_token_id": [one[2], two[4]], "pad_token_id": PAD}
    keys = [654, 400, 836, 123, 340]
    return {
        "guidance_scale": {"guidance_scale": 1.7},
        "sequence_bias": {"sequence_bias": {(one[2],): -30.0, (two[0], two[1]): -30.0}},
        "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.6},
        "repetition_penalty": {"repetition_penalty": 1.5},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
        "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
        "bad_words_ids": {"bad_words_ids": [[one[1]], [two[1], two[2]]]},
        "min_length": {"min_length": 9, **ends},
        "min_new_tokens": {"min_new_tokens": 6, **ends},
        "forced_bos_token_id": {"forced_bos_token_id": 7},
        "forced_eos_token_id": {"forced_eos_token_id": 7},
        "remove_invalid_values": {"remove_invalid_values": True, "bad_words_ids": [[one[1]]]},
        "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 3.0), **ends},
        "suppress_tokens": {"suppress_tokens": [one[2], two[2]]},
        "begin_suppress_tokens": {"begin_suppress_tokens": [one[0], two[0]]},
        "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=4.0)},
        "watermarking_config, synthid": {
            "watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=keys)
        },
        "renormalize_logits": {"renormalize_logits": True, "repetition_penalty": 1.5},
    }


# Those that act on sampled tokens alone.
SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_h": {"top_h": 0.5},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "typical_p": {"typical_p": 0.6},
    "epsilon_cutoff": {"epsilon_cutoff": 0.02},
    "eta_cutoff": {"eta_cutoff": 0.02},
    "several": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "several, normalized": {"temperature": 0.7, "top_p": 0.9, "renormalize_logits": True},
}


def read_by_transformers() -> set[str]:
    """Return the names of the settings that transformers' factory of processors reads."""
    from transformers import GenerationMixin

    source = inspect.getsource(GenerationMixin._get_logits_processor)
    return set(re.findall(r"generation_config\.(\w+)", source)) - BESIDE
