"""Faults on the way of attention weights: from q and K to tokens, and to what a policy is asked.

The same columns as in `catalogue.py`, which lists these with its own.
"""

from __future__ import annotations

from dataclasses import replace

from support.mutation import Mutant, mutant

_LEDGER = "vtoken.policies.ledger"
_SCORES = "vtoken.policies.scores"
_TAP = "vtoken.vllm.scores"
_BUFFERS = "vtoken.vllm.query_buffers:QueryBuffers"
_ASKED = "vtoken.policies.judging:view_to_ask"
_ALL = ("eager", "off", "background")

CHOOSING: tuple[Mutant, ...] = tuple(
    replace(fault, hunt="choosing", modes=_ALL)
    for fault in (
        # Whose weights they are.
        mutant("weights stay behind when tokens move", f"{_LEDGER}:ids_in_attention_order",
               "if table.num_holes:", "if True:", "bytes"),
        mutant("weights of a row with holes go by position", f"{_LEDGER}:ids_in_attention_order",
               "if table.num_holes:", "if False:", "bytes L6 crash"),
        mutant("weights go to who is there when they come", f"{_LEDGER}:ScoreLedger.arrived",
               "token_ids=row.token_ids,", "token_ids=ids_in_attention_order(table),", "bytes"),
        mutant("a new life is shown the old one's weights", f"{_LEDGER}:ScoreLedger.arrived",
               "if table is None or table.life != row.life:", "if table is None:", "bytes L6"),
        mutant("weights that come late are counted for the next step",
               f"{_LEDGER}:ScoreLedger.end_step",
               "self._open.append((self._number, self._step))",
               "self._open.append((self._number, dict(self._step)))\n    "
               "self._open.rotate(len(self._open) > 1)", "I4 bytes crash"),
        mutant("a recycled slot's newcomer inherits", f"{_SCORES}:TokenArray.align",
               "self._values[old:count] = 0", "pass", "bytes"),
        mutant("sums lie in the order of the step before", f"{_SCORES}:TokenArray.align",
               "same = count >= old and bool((token_ids[:old] == self._ids[:old]).all())",
               "same = count >= old", "bytes"),
        mutant("sums are spread in the order of the new ids", f"{_SCORES}:TokenArray.align",
               "self._values[:count] = dense[token_ids]",
               "self._values[:count] = dense[np.sort(token_ids)]", "bytes"),
        # Which steps are looked at, and how closely.
        mutant("sampling counts one token behind", f"{_LEDGER}:ScoreLedger.row",
               "table.logical_len % mine.score_every", "(table.logical_len - 1) % mine.score_every",
               "bytes"),
        mutant("prompts are sampled too", f"{_LEDGER}:ScoreLedger.row",
               "if sampled and not prompt and", "if sampled and", "bytes"),
        mutant("the window is one query too wide", f"{_LEDGER}:ScoreLedger.row",
               "queries = min(count, mine.score_window)",
               "queries = min(count, mine.score_window + 1)", "bytes"),
        mutant("a request is looked at as the one before", f"{_LEDGER}:ScoreLedger.row",
               "mine = settings or self._settings",
               "mine, self._settings = self._settings, settings or self._settings", "bytes"),
        # What a policy is asked, and what may go.
        mutant("one recent token too few is protected", _ASKED,
               "newest - protection.keep_recent", "newest - max(0, protection.keep_recent - 1)",
               "bytes"),
        mutant("the first tokens are protected up to one too few", _ASKED,
               "first, stop = protection.keep_first,",
               "first, stop = max(0, protection.keep_first - 1),", "bytes"),
        mutant("the prompt is not protected", _ASKED, "if protection.keep_prompt:", "if False:",
               "bytes"),
        mutant("the step's own token is not counted", _ASKED,
               "over = num_live + 1 - budget", "over = num_live - budget", "bytes"),
        mutant("eviction fires one token early", _ASKED,
               "if over <= protection.slack:", "if over < protection.slack or over <= 0:", "bytes"),
    )
)  # fmt: skip

TAP: tuple[Mutant, ...] = tuple(
    replace(fault, hunt="tap")
    for fault in (
        mutant("the window begins one query early", f"{_TAP}:scored_row",
               "chunk.stop - tap.queries), chunk.stop)",
               "chunk.stop - tap.queries - 1), chunk.stop - 1)", "bytes"),
        mutant("the window is the chunk's first queries", f"{_TAP}:scored_row",
               "observed = slice(max(chunk.start, chunk.stop - tap.queries), chunk.stop)",
               "observed = slice(chunk.start, chunk.start + tap.queries)", "bytes"),
        mutant("the first of every few layers is looked at", f"{_TAP}:tapped_layers",
               "names[stride - 1 :: stride]", "names[::stride]", "bytes"),
        mutant("all rows are looked at in every tapped layer", f"{_TAP}:StepTap._score",
               "for row, index in self._readers[name]:",
               "for row, index in max(self._readers.values(), key=len):", "bytes crash"),
        mutant("the sum over ranks is dropped", f"{_TAP}:_sum_over_ranks",
               "torch.distributed.all_reduce(flat, group=group.cpu_group)", "pass",
               "bytes crash"),
        mutant("only the sums of tokens cross the ranks", f"{_TAP}:_sum_over_ranks",
               "if row.all_heads is not None:", "if False:", "bytes"),
        mutant("another rank's heads take the place of one's own", "vtoken.kv.scores:ScoredRow.of",
               "row.all_heads[:, rank * heads : (rank + 1) * heads]", "row.all_heads[:, :heads]",
               "bytes crash"),
        mutant("q is kept by reference and used when it has changed",
               f"{_BUFFERS}.hand_over",
               "self._buffers[name][: len(query)].copy_(query)", "self._buffers[name] = query",
               "bytes"),
        mutant("captured copies are not counted", f"{_BUFFERS}.hand_over",
               "self._counts[self._places[name]].add_(1)", "pass", "L6 bytes"),
        mutant("one buffer serves all layers", f"{_BUFFERS}.query",
               "return self._buffers[name]", "return next(iter(self._buffers.values()))", "bytes"),
        mutant("a row's weights of single layers overwrite each other", f"{_TAP}:DeviceSums.add",
               "self._total + total", "total", "bytes"),
        mutant("a long step's queries are handed over twice", f"{_TAP}:CapturedTap._complete",
               "if name not in self._taken:", "if True:", "bytes crash"),
        mutant("slots beside the listed ones are read", "vtoken.kv.scores:ScoredRow.of",
               "places = (index * block_size + offsets)",
               "places = (index * block_size + (offsets ^ 1))", "bytes"),
        mutant("queries see the tokens after them", "vtoken.kv.scores:row_weights",
               "newest = torch.arange(count - observing, count, device=keys.device)[:, None]",
               "newest = torch.full((observing, 1), count, device=keys.device)", "bytes"),
        mutant("query heads are dealt to KV heads in turn", "vtoken.kv.scores:row_weights",
               "grouped = observed.unflatten(1, (num_kv, num_heads // num_kv))",
               "grouped = observed.unflatten(1, (-1, num_kv)).transpose(1, 2)", "bytes"),
        mutant("the soft cap is left out", "vtoken.kv.scores:row_weights", "if cap:", "if False:",
               "bytes"),
    )
)  # fmt: skip
