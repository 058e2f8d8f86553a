"""From result lines to the paper's tables, with our column beside the paper's."""

from experiments.report.page import html
from experiments.report.summary import Summary, summarise
from experiments.report.tables import markdown

__all__ = ["Summary", "html", "markdown", "summarise"]
