"""The figures of the paper (arXiv 2610.13735) that reports put beside ours, always marked as the paper's.

Known are means only; which tasks they are over is not, so the task lists here are assumed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PaperRow:
    """A mean of the paper for both arms, in percent."""

    table: str
    setting: str
    transformer: float
    orthros: float

    @property
    def origin(self) -> str:
        """Where it stands, and that it is no measurement of ours."""
        return f"the paper's (arXiv 2610.13735, {self.table}: {self.setting}), not measured here"

    def of(self, architecture: str | None) -> float | None:
        """The figure of an arm; None for an architecture that is neither."""
        return {"transformer": self.transformer, "orthros": self.orthros}.get(architecture or "")


SUITE_ROWS = {
    "commonsense": PaperRow("Table 1", "1.3B, mean of the commonsense tasks", 53.41, 53.98),
    "conversion": PaperRow("Table 2", "Llama-3.1 conversion, mean", 65.47, 67.26),
    "recall": PaperRow("Table 3", "1.3B, mean of the recall tasks", 33.9, 34.4),
}
TTFT = PaperRow("Table 4", "seconds to first token, 128K input, 128 output, H100, SGLang", 77.249, 17.016)
DECODE = PaperRow("Table 4", "decode only, tokens/s", 33.3, 33.7)
