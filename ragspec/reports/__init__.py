"""Figures of a run, and its trace on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.reports.builder import ReportBuilder as ReportBuilder
    from ragspec.reports.report import Report as Report
    from ragspec.reports.trace import Trace as Trace
    from ragspec.reports.trace import read_trace as read_trace
    from ragspec.reports.trace import write_trace as write_trace

_WHERE = {
    "Report": "ragspec.reports.report",
    "ReportBuilder": "ragspec.reports.builder",
    "Trace": "ragspec.reports.trace",
    "read_trace": "ragspec.reports.trace",
    "write_trace": "ragspec.reports.trace",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
