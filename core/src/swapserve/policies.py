"""The three policies a server is made of, as the interfaces an author implements.

A scheduler decides who runs and how much, a KV manager decides where keys and values are stored, a
speculator guesses tokens ahead. The three never meet: each sees requests, and the scheduler a plan.
Any of each kind works with any of the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, ConfigDict

from swapserve.request import Draft, Request

if TYPE_CHECKING:
    from swapserve.batch import Executor
    from swapserve.plan import StepPlan


class PolicyOptions(BaseModel):
    """The options of a policy: a frozen pydantic model whose fields become `NAME,key=value` on the command line.

    Give every field a default where one makes sense, and a `description`: it is the field's help text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True)
class ModelInfo:
    """What a policy may know of the model that is served."""

    name: str
    vocab_size: int
    """Token ids run from 0 to vocab_size - 1."""
    max_model_len: int
    """The longest prompt and output together, in tokens."""
    eos_token_ids: frozenset[int] = frozenset()
    max_num_seqs: int = 1
    """The most requests a step can hold."""
    max_num_batched_tokens: int = 1
    """The most tokens a step can hold."""
    vocabulary: Callable[[], Mapping[str, int]] | None = None
    """Token text to token id, where a tokenizer is known."""
    open_model: Callable[[str], OpenModel] | None = None
    """Opens another model on the same device, with the same kernels: the draft speculator's way to its model."""


@dataclass(frozen=True)
class OpenModel:
    """Another model, opened beside the one that is served; `executor` makes the KV pool it runs on."""

    info: ModelInfo
    executor: Callable[[int, int], Executor]
    """(num_blocks, block_size) -> an executor with a KV pool of that size."""


class Scheduler(ABC):
    """Decides who runs in a step, in what order and how many tokens of each.

    Example: the whole of continuous batching::

        class Continuous(Scheduler):
            name = "continuous"

            def schedule(self, plan):
                for request in plan.running:
                    plan.make_room_for(request)
                for request in plan.waiting:
                    if not plan.include(request):
                        break
    """

    name: ClassVar[str]
    """What `--scheduler` selects it by."""
    splits_prompts: ClassVar[bool] = False
    """Whether a prompt may take several steps; where not, a prompt longer than a step is refused at submit."""

    class Options(PolicyOptions):
        """No options unless a scheduler defines its own."""

    def __init__(self, options: PolicyOptions) -> None:
        self.options = options

    @abstractmethod
    def schedule(self, plan: StepPlan) -> None:
        """Fill the plan for one step. Cost may grow with the batch, never with the number waiting."""

    def forget(self, request: Request) -> None:  # noqa: B027 - a default that may be overridden
        """The request is finished or aborted: drop what you know of it."""


class KVManager(ABC):
    """Decides which slots hold the keys and values of which request; plain bookkeeping, no tensors.

    Position `p` of a request is stored in slot `table[p // block_size] * block_size + p % block_size`.
    A request that holds nothing begins with `lookup` and `reserve`, grows by `reserve`, and ends with `free`;
    `commit` after every step says how much is verified.
    """

    name: ClassVar[str]
    """What `--kv` selects it by."""
    block_size: int
    """Slots in a block: the unit of `table`."""
    num_slots: int
    """Slots there are: a multiple of block_size."""

    class Options(PolicyOptions):
        """No options unless a KV manager defines its own."""

    def __init__(self, options: PolicyOptions, num_slots: int) -> None:
        self.options = options
        self.num_slots = num_slots

    def lookup(self, request: Request) -> int:
        """How many leading tokens (of `tokens[:-1]`) are stored. Changes nothing; valid until the next change."""
        return 0

    def awaited(self, request: Request) -> str | None:
        """Id of the request that holds, not committed yet, the next block after `lookup`'s. Changes nothing."""
        return None

    @abstractmethod
    def fits(self, request: Request, cached: int, total: int) -> bool:
        """Whether `reserve` with these arguments would succeed now. Changes nothing."""

    @abstractmethod
    def reserve(self, request: Request, cached: int, total: int) -> bool:
        """Hold slots for positions [0, total): the first `cached` by sharing what `lookup` found just now.

        All or nothing: False changes nothing. Only grows: for a request that holds slots already, `cached` is
        ignored and its table is only added to.
        """

    @abstractmethod
    def table(self, request: Request) -> Sequence[int]:
        """The ids of the request's blocks, in order of position."""

    def commit(self, request: Request) -> None:  # noqa: B027 - a default that may be overridden
        """`tokens[:computed]` are verified and stored: share them. Slots past `len(tokens)` may be taken back.

        Slots of tokens that are not computed yet stay held: a long prompt is computed in pieces.
        The only place where anything becomes visible to `lookup`. Harmless for a request that holds nothing.
        """

    @abstractmethod
    def free(self, request: Request) -> None:
        """Let go of everything the request holds. Safe to call twice, and for a request never seen."""

    def discard(self, request: Request) -> None:
        """`free`, and let no one find what the request stored: its contents cannot be trusted.

        Override it where `commit` makes blocks visible to `lookup`.
        """
        self.free(request)

    @abstractmethod
    def usage(self) -> float:
        """The share of slots that live requests hold, 0 to 1."""

    def longest(self) -> int:
        """The most positions one request alone could ever hold."""
        return self.num_slots

    def reset(self) -> bool:
        """Forget what is kept for sharing but held by no one; False when some of it is still held."""
        return True

    def check(self) -> None:  # noqa: B027 - a default that may be overridden
        """Raise `AssertionError` when the bookkeeping disagrees with itself."""


class Speculator(ABC):
    """Guesses the tokens that come next, for the model to verify several in one step."""

    name: ClassVar[str]
    """What `--speculator` selects it by."""
    max_draft: int
    """The longest draft it ever proposes, in tokens."""

    class Options(PolicyOptions):
        """No options unless a speculator defines its own."""

    def __init__(self, options: PolicyOptions, target: ModelInfo) -> None:
        self.options = options
        self.target = target

    @abstractmethod
    def propose(self, requests: Sequence[Request]) -> Mapping[str, Draft]:
        """Drafts by request id. A missing or short answer is fine; one longer than `draft_room` is cut."""

    def observe(self, request: Request, proposed: int, accepted: int) -> None:  # noqa: B027
        """Of a draft of `proposed` tokens that was verified, the first `accepted` were right."""

    def forget(self, request: Request) -> None:  # noqa: B027 - a default that may be overridden
        """The request is finished, aborted or preempted: drop what you keep for it. Harmless for one never seen."""


POLICY_KINDS: Mapping[str, type[Scheduler] | type[KVManager] | type[Speculator]] = {
    "scheduler": Scheduler,
    "kv": KVManager,
    "speculator": Speculator,
}
