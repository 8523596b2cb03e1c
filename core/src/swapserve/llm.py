"""Generation without a server: a model, three policies and a list of prompts.

    llm = LLM("path/to/model", kv="prefix")
    print(llm.generate("The capital of France is")[0].text)

Imports torch; `from swapserve import LLM` imports this module only when it is asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, cast, final

from swapserve.build import Policies, Progress, Served, build_engine, choose_policies
from swapserve.config import Settings, Source, merge
from swapserve.detokenizer import TextStream
from swapserve.params import SamplingParams
from swapserve.plugins import Plugins
from swapserve.request import FinishReason, Output, Request, RequestRefused, TokenLogprobs

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. `error` says why there is none, where a request could not run."""

    prompt: Prompt
    prompt_tokens: Sequence[int]
    text: str
    tokens: Sequence[int]
    finish_reason: FinishReason
    logprobs: Sequence[TokenLogprobs] | None = None
    """One entry a token, where the parameters ask for them."""
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    cached_tokens: int = 0
    """Tokens of the prompt that were found in the prefix cache."""
    error: str | None = None


@dataclass(slots=True, eq=False)
class _Answer:
    """A request on its way, with the text so far."""

    index: int
    prompt: Prompt
    request: Request
    stream: TextStream
    done: deque[_Answer]
    """Where it goes when it is finished."""
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def take(self, output: Output) -> None:
        """Add what a step brought; a stop string in the text ends the answer and drops the tokens after it."""
        chunk = self.stream.take(output)
        self.text += chunk.text
        self.tokens += chunk.tokens
        self.logprobs += chunk.logprobs or ()
        self.finish_reason = chunk.finish_reason

    def completion(self) -> Completion:
        """The answer as its reader sees it, once it is finished."""
        request = self.request
        assert self.finish_reason is not None
        return Completion(
            prompt=self.prompt,
            prompt_tokens=request.prompt,
            text=self.text,
            tokens=self.tokens,
            finish_reason=self.finish_reason,
            logprobs=self.logprobs if request.params.logprobs is not None else None,
            prompt_logprobs=request.prompt_logprobs if request.params.prompt_logprobs is not None else None,
            cached_tokens=request.cached_tokens or 0,
            error=request.error,
        )


@final
class LLM:
    """A model with a scheduler, a KV manager and a speculator, for generating in this process.

    Settings are those of the command line by the same names and defaults: `max_model_len`, `kv_cache_memory_bytes`,
    `device` and so on; `SettingsError`, `PluginError` and `ModelError` say what is wrong with one. Not thread-safe.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        scheduler: str = "chunked",
        kv: str = "prefix",
        speculator: str = "none",
        progress: Progress = lambda message: None,
        **settings: Any,
    ) -> None:
        chosen = {"model": model, "scheduler": scheduler, "kv": kv, "speculator": speculator}
        # A default is no choice: vLLM's other names for a policy may still make it.
        given = {name: value for name, value in chosen.items() if value != Settings.model_fields[name].default}
        merged = merge([Source({**settings, **given}, "argument")])
        plugins = Plugins()
        self._adopt(build_engine(merged, plugins, choose_policies(merged, plugins), progress))

    @classmethod
    def from_settings(
        cls, settings: Settings, plugins: Plugins, policies: Policies, progress: Progress = lambda message: None
    ) -> LLM:
        """The same from settings that were read and policies that were chosen already."""
        llm = cls.__new__(cls)
        llm._adopt(build_engine(settings, plugins, policies, progress))
        return llm

    def _adopt(self, served: Served) -> None:
        self.chosen = served.chosen
        self.tokenizer = served.tokenizer
        self._engine = served.engine
        self._answers: dict[str, _Answer] = {}

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Answer one prompt (text or token ids) or a list of them; the answers are in the order of the prompts.

        `params` are the same for all, or one for each. Raises `RequestRefused` when a prompt can never run; none
        is answered then. An answer that failed on the way has its `error`.
        """
        several = _as_prompts(prompts)
        answers = dict(self.iterate(several, params))
        return [answers[index] for index in range(len(several))]

    def iterate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        keep_going: bool = False,
    ) -> Iterator[tuple[int, Completion]]:
        """Answers as they are finished, each with the index of its prompt.

        With `keep_going`, a prompt that can never run has an answer with its `error`, and the others are answered.
        Closing the iterator gives up what is not finished.
        """
        live: dict[int, _Answer] = {}
        done: deque[_Answer] = deque()
        try:
            for index, (prompt, chosen) in enumerate(_with_params(prompts, params)):
                try:
                    live[index] = self._submit(index, prompt, chosen, done)
                except RequestRefused as refusal:
                    if not keep_going:
                        raise
                    yield index, Completion(prompt, (), "", (), FinishReason.ERROR, error=str(refusal))
            while live:
                self._step()
                while done:
                    answer = done.popleft()
                    del live[answer.index]
                    yield answer.index, answer.completion()
        finally:
            for answer in live.values():
                self._give_up(answer)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """The text of one answer, piece by piece. Closing the iterator gives the answer up.

        Raises `RequestRefused` for a prompt that can never run, and `RuntimeError` for an answer that failed.
        """
        answer = self._submit(0, prompt, params or SamplingParams(), deque())
        num_given = 0
        try:
            while answer.finish_reason is None or len(answer.text) > num_given:
                if len(answer.text) == num_given:
                    self._step()
                if piece := answer.text[num_given:]:
                    num_given += len(piece)
                    yield piece
            if answer.request.error is not None:
                raise RuntimeError(f"the answer failed: {answer.request.error}")
        finally:
            self._give_up(answer)

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Completion:
        """The answer to a conversation, with the model's chat template; `RequestRefused` when it has none."""
        return self.generate([self.render_chat(messages)], params)[0]

    def render_chat(self, messages: Sequence[Message]) -> Prompt:
        """A conversation as the prompt, in tokens, that the model's chat template makes of it."""
        return self.tokenizer.encode_chat(self.tokenizer.render_chat(messages))

    def _submit(self, index: int, prompt: Prompt, params: SamplingParams, done: deque[_Answer]) -> _Answer:
        """Put one prompt into the engine's queue."""
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        request = self._engine.submit(tokens, params)
        answer = _Answer(index, prompt, request, TextStream(self.tokenizer, request.prompt, params), done)
        self._answers[request.id] = answer
        return answer

    def _step(self) -> None:
        """One step of the engine, for everyone's requests; what a failed step held ends with its error."""
        try:
            outputs = self._engine.step()
        except Exception as error:
            outputs = self._engine.recover(error)
        for output in outputs:
            answer = self._answers.get(output.request.id)
            if answer is None:
                continue
            answer.take(output)
            if answer.finish_reason is not None:
                self._give_up(answer)
                answer.done.append(answer)

    def _give_up(self, answer: _Answer) -> None:
        """Let go of an answer: the engine need not go on with it. Harmless for one that is finished."""
        if self._answers.pop(answer.request.id, None) is not None:
            self._engine.abort(answer.request.id)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A single prompt is a list of one: a string, or a list of numbers."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [cast(Prompt, prompts)]
    return cast(Sequence[Prompt], prompts)


def _with_params(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> Iterator[tuple[Prompt, SamplingParams]]:
    """Each prompt with its parameters."""
    if params is None or isinstance(params, SamplingParams):
        return zip(prompts, repeat(params or SamplingParams()), strict=False)
    if len(params) != len(prompts):
        raise ValueError(f"there are {len(prompts)} prompts and {len(params)} sampling parameters: give one for each")
    return zip(prompts, params, strict=True)
