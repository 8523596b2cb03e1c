"""The ghost: a model without weights that reads its context only through the block table.

It writes (position, token) into slots where a real model writes keys and values, and before it answers
it compares what it reads with what should be there. A wrong table, a lost block or a block shared too
early is caught at the step where it happens, also when the output would have looked right.
"""

from __future__ import annotations

from collections.abc import Sequence

from swapserve.batch import Batch, Verdict, Work
from swapserve.params import SamplingParams
from swapserve.policies import ModelInfo, OpenModel
from swapserve.request import Request


class GhostMismatch(AssertionError):
    """A slot did not hold what the request had stored there."""


class GhostModel:
    """The next token as a pure function of the context.

    Mostly it follows from the last two tokens, so that text repeats itself and look-ups guess right; at every
    `memory`-th position it depends on the whole context. With `agreement` below 1 the model differs from the
    ghost with `agreement` 1 at that share of positions: a draft model that is right sometimes.
    """

    def __init__(self, vocab_size: int = 24, seed: int = 0, memory: int = 5, agreement: float = 1.0) -> None:
        self.vocab_size, self.seed, self.memory, self.agreement = vocab_size, seed, memory, agreement

    def next_token(self, context: Sequence[int]) -> int:
        """The token that follows `context` (at least one token)."""
        length = len(context)
        if length % self.memory == 0:
            state = self.seed
            for token in context:
                state = (state * 31 + token + 7) & 0xFFFFFFFF
        else:
            previous = context[-2] if length > 1 else 0
            state = (self.seed + 1) * 7919 + context[-1] * 31 + previous * 5
        token = (state ^ (state >> 7)) % self.vocab_size
        if self.agreement < 1.0 and (length * 2654435761 + context[-1] * 40503) % 1000 >= self.agreement * 1000:
            token = (token + 1) % self.vocab_size
        return token

    def continuation(self, request: Request) -> list[int]:
        """What one request alone gives, greedily, ending where the request says: the answer every policy must give."""
        tokens = list(request.prompt)
        while len(tokens) < request.max_len:
            tokens.append(self.next_token(tokens))
            if tokens[-1] in request.stop_ids and len(tokens) - len(request.prompt) > request.params.min_tokens:
                break
        return tokens[len(request.prompt) :]


class GhostExecutor:
    """Runs the ghost on a pool of slots and verifies drafts greedily, as a real executor would."""

    def __init__(self, num_blocks: int, block_size: int, model: GhostModel | None = None) -> None:
        self.model = model or GhostModel()
        self.block_size = block_size
        self.slots: list[tuple[int, int] | None] = [None] * (num_blocks * block_size)
        self.num_computed = 0

    def execute(self, batch: Batch) -> list[Verdict]:
        """All writes of the batch come before all reads, as the kernels have it."""
        if batch.block_size != self.block_size:
            raise GhostMismatch(
                f"the batch has blocks of {batch.block_size} slots, the pool blocks of {self.block_size}"
            )
        for work in batch.works:
            self._write(work)
        return [self._judge(work) for work in batch.works]

    def forget(self, request: Request) -> None:
        """The ghost keeps nothing per request."""

    def _write(self, work: Work) -> None:
        piece, size = work.slice, self.block_size
        if len(work.token_ids) != piece.count:
            raise GhostMismatch(f"{piece.request.id}: {len(work.token_ids)} token ids for {piece.count} positions")
        for offset, token in enumerate(work.token_ids):
            position = piece.start + offset
            self.slots[work.table[position // size] * size + position % size] = (position, token)
        self.num_computed += piece.count

    def _judge(self, work: Work) -> Verdict:
        piece, request, size = work.slice, work.slice.request, self.block_size
        expected = request.tokens + list(request.draft.tokens if request.draft else ())
        context = []
        for position in range(piece.end):
            slot = work.table[position // size] * size + position % size
            if self.slots[slot] != (position, expected[position]):
                raise GhostMismatch(
                    f"{request.id}: position {position} is slot {slot}, which holds {self.slots[slot]} "
                    f"(position, token) instead of {(position, expected[position])}"
                )
            context.append(expected[position])
        if not piece.samples:
            return Verdict()
        tokens: list[int] = []
        for length in range(len(request.tokens), piece.end + 1):
            tokens.append(self.model.next_token(context[:length]))
            if length < piece.end and context[length] != tokens[-1]:
                break
        return Verdict(tokens)


def ghost_info(
    model: GhostModel | None = None,
    *,
    max_model_len: int = 64,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 32,
    eos_token_ids: frozenset[int] = frozenset(),
) -> ModelInfo:
    """The ghost as policies see it. `open_model("ghost:0.7")` opens a ghost that agrees at 70 % of positions."""
    model = model or GhostModel()

    def open_model(name: str) -> OpenModel:
        agreement = float(name.partition(":")[2] or 1.0)
        other = GhostModel(model.vocab_size, model.seed, model.memory, agreement)
        return OpenModel(info, lambda num_blocks, block_size: GhostExecutor(num_blocks, block_size, other))

    info = ModelInfo(
        name="ghost",
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        open_model=open_model,
    )
    return info


def greedy(max_tokens: int | None = 8, **fields: object) -> SamplingParams:
    """Greedy sampling parameters, for tests."""
    return SamplingParams.model_validate({"temperature": 0.0, "max_tokens": max_tokens, **fields})
