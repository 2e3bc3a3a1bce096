"""Report on the runs of a folder."""

from typing import Literal

Format = Literal["html", "markdown", "json", "csv"]
"""Format of a report."""
