"""The names of variants of text decoding that are no drafters."""

from __future__ import annotations

GREEDY, LOOKUP, ASSISTANT = PEERS = ("hf-greedy", "hf-lookup", "hf-assistant")  # transformers'
DEFAULT_VARIANTS = (*PEERS, "plain", "context", "model", "fused")
