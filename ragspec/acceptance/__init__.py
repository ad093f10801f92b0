"""Acceptance rules: which nodes of a draft are kept, and the token that follows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.acceptance.base import Rule as Rule
    from ragspec.acceptance.base import Step as Step
    from ragspec.acceptance.base import TargetView as TargetView
    from ragspec.acceptance.base import Verdict as Verdict
    from ragspec.acceptance.block_verification import Block as Block
    from ragspec.acceptance.k_seq import KSeq as KSeq
    from ragspec.acceptance.rejection import ChainRejection as ChainRejection
    from ragspec.acceptance.rejection import MultiStep as MultiStep
    from ragspec.acceptance.rejection import WithoutReplacement as WithoutReplacement
    from ragspec.acceptance.target_view import RowView as RowView
    from ragspec.acceptance.typical import Typical as Typical
    from ragspec.acceptance.walk import Walk as Walk

_WHERE = {
    "Block": "ragspec.acceptance.block_verification",
    "ChainRejection": "ragspec.acceptance.rejection",
    "KSeq": "ragspec.acceptance.k_seq",
    "MultiStep": "ragspec.acceptance.rejection",
    "RowView": "ragspec.acceptance.target_view",
    "Rule": "ragspec.acceptance.base",
    "Step": "ragspec.acceptance.base",
    "TargetView": "ragspec.acceptance.base",
    "Typical": "ragspec.acceptance.typical",
    "Verdict": "ragspec.acceptance.base",
    "Walk": "ragspec.acceptance.walk",
    "WithoutReplacement": "ragspec.acceptance.rejection",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
