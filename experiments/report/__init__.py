"""From result lines to the paper's tables, with our column beside the paper's."""

from experiments.report.page import write_page
from experiments.report.summary import Summary, summarise
from experiments.report.tables import write_markdown

__all__ = ["Summary", "summarise", "write_markdown", "write_page"]
