"""Pages of results: one file each, nothing from elsewhere, light and dark; their frame and their pictures."""

from pages.frame import page
from pages.pictures import COLOURS, MARKERS, PLAIN, SIZE, STYLE, svg

__all__ = ["COLOURS", "MARKERS", "PLAIN", "SIZE", "STYLE", "page", "svg"]
