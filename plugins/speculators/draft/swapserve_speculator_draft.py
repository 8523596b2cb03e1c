"""Speculation with a draft model (Leviathan et al. 2023; Chen et al. 2023): a small model guesses, the served checks.

The draft model runs on a KV cache of its own. Each request has a mirror there: the request's verified tokens, then
the draft. What the served model rejects is cut off the mirror again, and only tokens it has not seen are computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, final

from pydantic import Field

from swapserve import (
    Batch,
    Draft,
    ModelInfo,
    PluginError,
    PolicyOptions,
    Request,
    SamplingParams,
    Slice,
    Speculator,
    Verdict,
    Work,
    hookimpl,
)

if TYPE_CHECKING:
    import torch

BLOCK_SIZE = 16
DEFAULT_CACHE_TOKENS = 32_768
"""The draft model's cache when nothing else is said, unless fewer tokens than this could ever be needed."""


class _Mirror:
    """What the draft model knows of one request: tokens, how many are computed, blocks, and the draft being made."""

    def __init__(self, request: Request, vocab_size: int) -> None:
        self.request = Request(
            id=request.id,
            prompt=request.prompt,
            params=_draft_params(request.params, vocab_size),
            max_len=2**62,
            # A client's seed fixes the output, whatever is drafted: with the same draws the draft is right most often.
            # Otherwise the two models' draws must be independent of each other.
            seed=request.seed if request.params.seed is not None else (request.seed * 0x9E3779B97F4A7C15 + 1) % 2**64,
        )
        self.table: list[int] = []
        self.verified = 0
        self.draft: list[int] = []
        self.probs: list[torch.Tensor] = []
        self.room = 0
        self.was_put_out = False
        """Whether it had blocks and lost them, since there was no room for it to grow."""
        self.is_given_up = False
        """Whether the draft model can do nothing for this request, now or later."""

    def follows(self, request: Request) -> bool:
        """Whether this is the request it mirrors: the very same prompt, and no fewer tokens than before."""
        return self.request.prompt is request.prompt and len(request.tokens) >= self.verified

    def catch_up(self, request: Request, room: int) -> None:
        """Take over the request's tokens, keeping what is computed of those that it shares with the last draft."""
        mine, theirs, same = self.request.tokens, request.tokens, self.verified
        while same < min(len(mine), len(theirs)) and mine[same] == theirs[same]:
            same += 1
        mine[same:] = theirs[same:]
        self.request.computed = min(self.request.computed, same, len(mine) - 1)
        self.verified, self.room = len(theirs), room
        self.draft, self.probs = [], []

    def take(self, verdict: Verdict) -> None:
        """One more drafted token."""
        self.draft.append(verdict.tokens[0])
        self.request.tokens.append(verdict.tokens[0])
        if verdict.probs is not None:
            self.probs.append(verdict.probs[0])


@final
class DraftModel(Speculator):
    """Proposes what a smaller model with the same vocabulary would say, with its probabilities.

    Sampled output keeps the served model's distribution exactly. Worth it when the small model is often right and
    the server has time to spare: few requests at once.
    """

    name = "draft"

    class Options(PolicyOptions):
        model: str = Field(description="folder, GGUF file or hub name of the draft model")
        num_speculative_tokens: int = Field(4, ge=1, le=64, description="longest draft")
        kv_cache_tokens: int | None = Field(
            None,
            ge=BLOCK_SIZE,
            description=f"size of the draft model's own cache; unset: at most {DEFAULT_CACHE_TOKENS}",
        )

    def __init__(self, options: Options, target: ModelInfo) -> None:
        super().__init__(options, target)
        self.max_draft = options.num_speculative_tokens
        if target.open_model is None:
            raise PluginError("speculator 'draft': this engine cannot open a second model; choose another speculator")
        opened = target.open_model(options.model)
        _check_vocabulary(options.model, opened.info, target)
        self._longest, self._vocab_size = opened.info.max_model_len, opened.info.vocab_size
        useful = target.max_num_seqs * min(target.max_model_len, self._longest)
        tokens = options.kv_cache_tokens or min(DEFAULT_CACHE_TOKENS, useful)
        num_blocks = -(-tokens // BLOCK_SIZE)
        self._executor = opened.executor(num_blocks, BLOCK_SIZE)
        self._free = list(range(num_blocks))
        self._mirrors: dict[str, _Mirror] = {}

    def propose(self, requests: Sequence[Request]) -> Mapping[str, Draft]:
        mirrors = [mirror for request in requests if (mirror := self._prepare(request)) is not None]
        self._catch_up(mirrors)
        drafting = mirrors
        while drafting := [mirror for mirror in drafting if len(mirror.draft) < mirror.room]:
            self._run([(mirror, 1) for mirror in drafting])
        return {mirror.request.id: draft for mirror in mirrors if (draft := self._draft(mirror)) is not None}

    def forget(self, request: Request) -> None:
        mirror = self._mirrors.pop(request.id, None)
        if mirror is not None:
            self._release(mirror)
            self._executor.forget(mirror.request)

    def _prepare(self, request: Request) -> _Mirror | None:
        """The request's mirror with blocks for its draft, or None where there is to be no draft."""
        mirror = self._mirrors.get(request.id)
        if mirror is not None and not mirror.follows(request):
            self.forget(request)
            mirror = None
        if mirror is None:
            mirror = self._mirrors[request.id] = _Mirror(request, self._vocab_size)
        if mirror.is_given_up:
            return None
        room = min(self.max_draft, request.draft_room, self._longest - len(request.tokens))
        if room <= 0 or max(request.tokens[mirror.verified :], default=0) >= self._vocab_size:
            # Too long for the draft model, or with a token that only the served model has: neither passes.
            self._give_up(mirror)
            return None
        if not self._allocate(mirror, len(request.tokens) + room - 1):
            return None
        mirror.catch_up(request, room)
        return mirror

    def _allocate(self, mirror: _Mirror, num_slots: int) -> bool:
        """Blocks for so many tokens (the last drafted one is never computed); False puts the mirror out.

        One without room to grow lets go of what it holds, so that others get on. It comes back only to ample room:
        each time its whole text is computed again.
        """
        missing = -(-num_slots // BLOCK_SIZE) - len(mirror.table)
        if missing * (2 if mirror.was_put_out and not mirror.table else 1) > len(self._free):
            mirror.was_put_out = mirror.was_put_out or bool(mirror.table)
            self._release(mirror)
            return False
        mirror.table += [self._free.pop() for _ in range(missing)]
        return True

    def _release(self, mirror: _Mirror) -> None:
        self._free.extend(mirror.table)
        mirror.table = []
        mirror.request.computed = 0

    def _give_up(self, mirror: _Mirror) -> None:
        """No draft for this request from now on, beyond what it has already."""
        mirror.is_given_up, mirror.room = True, len(mirror.draft)
        self._release(mirror)

    def _catch_up(self, mirrors: Sequence[_Mirror]) -> None:
        """Compute what the draft model has not seen, in batches of a step's size; each ends with one token drafted."""
        behind = list(mirrors)
        while behind:
            left, pieces = self.target.max_num_batched_tokens, []
            for mirror in behind:
                count = min(mirror.request.pending, left)
                if count:
                    pieces.append((mirror, count))
                    left -= count
            self._run(pieces)
            behind = [mirror for mirror in behind if mirror.room and not mirror.draft]

    def _run(self, pieces: Sequence[tuple[_Mirror, int]]) -> None:
        """Compute the next tokens of some mirrors; those that reach their end draft one more."""
        works = []
        for mirror, count in pieces:
            start = mirror.request.computed
            token_ids = mirror.request.tokens[start : start + count]
            works.append(Work(Slice(mirror.request, start, count), token_ids, mirror.table))
        verdicts = self._executor.execute(Batch(works, BLOCK_SIZE, wants_probs=True))
        for (mirror, count), verdict in zip(pieces, verdicts, strict=True):
            mirror.request.computed += count
            if verdict.error is not None:
                # The draft model's numbers are no good here; the served model has the last word anyway.
                self._give_up(mirror)
            elif verdict.tokens:
                mirror.take(verdict)

    def _draft(self, mirror: _Mirror) -> Draft | None:
        """The draft up to the first token that the served model does not have."""
        length = next((n for n, token in enumerate(mirror.draft) if token >= self.target.vocab_size), len(mirror.draft))
        if length == 0:
            return None
        tokens = tuple(mirror.draft[:length])
        if len(mirror.probs) < length:
            return Draft(tokens)
        return Draft(tokens, _fit_probabilities(mirror.probs[:length], self.target.vocab_size))


def _draft_params(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """What shapes the draft's distribution like the request's, without what depends on tokens that may be rejected."""
    kept = params.model_dump(include={"temperature", "top_k", "top_p", "min_p", "seed"})
    bias = {token: value for token, value in params.logit_bias.items() if token < vocab_size}
    return SamplingParams(max_tokens=None, ignore_eos=True, logit_bias=bias, **kept)


def _fit_probabilities(probs: Sequence[torch.Tensor], vocab_size: int) -> torch.Tensor:
    """Rows `[n, vocab_size]`: given that the token is one that the served model has, how likely was it?"""
    import torch

    rows = torch.stack(list(probs))
    if rows.shape[1] < vocab_size:
        return torch.nn.functional.pad(rows, (0, vocab_size - rows.shape[1]))
    if rows.shape[1] > vocab_size:
        rows = rows[:, :vocab_size]
        return rows / rows.sum(dim=1, keepdim=True)
    return rows


def _check_vocabulary(name: str, draft: ModelInfo, target: ModelInfo) -> None:
    """Refuse a draft model whose token ids mean something else; ids without a token (padding) may differ."""
    sizes = f"{draft.vocab_size} tokens and the served model's {target.vocab_size}"
    same = "choose a draft model with the same vocabulary"
    if draft.vocabulary is None or target.vocabulary is None:
        if draft.vocab_size != target.vocab_size:
            raise PluginError(f"speculator 'draft': the vocabulary of {name} has {sizes}; {same}")
        return
    texts, others = (
        {index: text for text, index in vocabulary().items()} for vocabulary in (draft.vocabulary, target.vocabulary)
    )
    for index in sorted(texts.keys() | others.keys()):
        if texts.get(index) != others.get(index):
            raise PluginError(
                f"speculator 'draft': the vocabulary of {name} has {sizes}; token {index} is {texts.get(index)!r} "
                f"there and {others.get(index)!r} here: {same}"
            )


@hookimpl
def swapserve_register_speculator() -> type[Speculator]:
    return DraftModel
