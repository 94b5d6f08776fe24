"""The pieces a report is built from before it is written: sections whose charts are not drawn yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.cli.paper import Block, Section
from specdec.cli.reporting.chart_render import Drawing

Part = Block | Drawing


@dataclass(frozen=True, kw_only=True)
class SectionParts:
    """A heading, and blocks and drawings under it."""

    title: str
    blocks: Sequence[Part]

    @property
    def drawings(self) -> list[Drawing]:
        """Its drawings, in order."""
        return [block for block in self.blocks if isinstance(block, Drawing)]

    def section(self, stem: str) -> Section:
        """The section with its charts drawn; their PNG files are named after `stem`."""
        blocks = [block.chart(stem) if isinstance(block, Drawing) else block for block in self.blocks]
        return Section(title=self.title, blocks=blocks)
