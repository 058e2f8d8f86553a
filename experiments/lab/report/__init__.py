"""From result lines to the paper's tables, with our column beside the paper's."""

from experiments.lab.report.page import html
from experiments.lab.report.summary import Summary, summarise
from experiments.lab.report.tables import markdown

__all__ = ["Summary", "html", "markdown", "summarise"]
