"""Seeded faults of the page-1 view and of the judgement that it was used."""

from __future__ import annotations

from dataclasses import replace

from support.mutation import Mutant, mutant

_PAGES = "vtoken.vllm.pages"
_TABLES = f"{_PAGES}:PageTables"

PAGES: tuple[Mutant, ...] = tuple(
    replace(fault, hunt="pages")
    for fault in (
        mutant("pages of a block follow those of the one before", f"{_TABLES}._fill_rows",
               "slots // self.block_size * self.between",
               "slots // self.block_size * self.block_size", "bytes crash"),
        mutant("rows with holes all begin where the first does", f"{_TABLES}._fill_rows",
               "shifts = places * width - (lengths.cumsum() - lengths)", "shifts = places * 0",
               "bytes crash"),
        mutant("rows without holes keep the lengths of an earlier step", f"{_TABLES}.fill",
               "self.lengths[:count] = metadata.seq_lens", "pass", "bytes"),
        mutant("a step is given tables of its own", f"{_TABLES}.fill",
               "block_table=self.tables[:count]", "block_table=self.tables[:count].clone()",
               "bytes"),
        mutant("the checker decodes pages as slots", f"{_TABLES}.slots",
               "blocks, offsets = np.divmod(pages, self.between)",
               "blocks, offsets = np.divmod(pages, self.block_size)", "bytes"),
        mutant("a page is as far from the next as a block", f"{_PAGES}:one_token_pages",
               "(token, head, token, element)", "(block, head, token, element)", "bytes crash"),
    )
) + tuple(
    replace(fault, hunt="view uses")
    for fault in (
        mutant("any step may be a replay", f"{_PAGES}:ViewUse.check",
               "if self._replayed and uses == 0", "if uses == 0", "bytes"),
        mutant("a layer that was captured without the view is overlooked",
               f"{_PAGES}:ViewUse._fold_dummy", "uses % self._num_layers != 0", "False", "bytes"),
        mutant("nothing has to be captured before a replay", f"{_PAGES}:ViewUse.check",
               "and self._captured and", "and", "bytes"),
        mutant("a batch that ran twice is a fault", f"{_PAGES}:ViewUse._fold_dummy",
               "uses % self._num_layers != 0", "uses not in (0, self._num_layers)", "L6"),
    )
)  # fmt: skip
