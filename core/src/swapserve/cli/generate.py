"""`serve generate [MODEL]`: answer prompts from a file or stdin, without a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import click
from pydantic import ValidationError

from swapserve.cli.options import GroupedOption, Refused, SettingsCommand, settings_from
from swapserve.cli.running import Reporter, refusals
from swapserve.config import SERVER
from swapserve.params import SamplingParams
from swapserve.request import RequestRefused

if TYPE_CHECKING:
    from swapserve.llm import LLM, Completion, Prompt

OWN = "Prompts and answers"
PROMPT_KEYS = ("prompt", "messages")


@dataclass(frozen=True)
class Job:
    """One prompt of the input, with the number of its line."""

    line: int
    prompt: Any
    is_chat: bool
    params: SamplingParams
    id: str | int | None = None


@click.command(
    cls=SettingsCommand,
    leave_out=(SERVER,),
    short_help="Answer prompts from a file or stdin, without a server.",
    params=[
        GroupedOption(
            ["--input"], type=click.File(encoding="utf-8"), default="-", metavar="FILE", group=OWN,
            help="Prompts, one a line, or JSONL; - is stdin.  [default: -]",
        ),
        GroupedOption(
            ["--output"], type=click.File("w", encoding="utf-8", lazy=True), default="-", metavar="FILE", group=OWN,
            help="Answers as JSONL, in the order of the prompts; - is stdout.  [default: -]",
        ),
        GroupedOption(["--max-tokens"], type=int, group=OWN, help="Most tokens of an answer.  [default: 16]"),
        GroupedOption(["--temperature"], type=float, group=OWN, help="0 is greedy.  [default: 1]"),
        GroupedOption(
            ["--sampling"], metavar="JSON", default="{}", group=OWN,
            help='Any sampling parameters by their API names, such as {"top_p": 0.9, "seed": 1}.',
        ),
    ],
)  # fmt: skip
def generate(input: IO[str], output: IO[str], **parameters: Any) -> None:
    """Answer prompts offline: one prompt a line in, one line of JSON an answer out.

    Input whose first line begins with { is JSONL: each line an object with `prompt` (text or token ids) or `messages`,
    and any sampling parameters of its own; an `id` is handed through. A prompt that cannot be answered gets a line
    with `error`, and the exit code is 1.
    """
    settings = settings_from(parameters)
    given = {name: parameters[name] for name in ("max_tokens", "temperature") if parameters[name] is not None}
    jobs = list(_read_jobs(input, {**_sampling(parameters["sampling"]), **given}))
    if not jobs:
        raise Refused("there are no prompts: give them one a line on stdin, or name a file with --input")
    report = Reporter()
    with refusals():
        from swapserve.build import choose_policies
        from swapserve.plugins import Plugins

        plugins = Plugins()
        policies = choose_policies(settings, plugins)
        from swapserve.llm import LLM

        llm = LLM.from_settings(settings, plugins, policies, progress=report)
        report.table(llm.chosen)
        failed = _answer(llm, jobs, output)
    if failed:
        click.echo(f"Error: {failed} of {len(jobs)} prompts were not answered: see `error` in their lines", err=True)
        click.get_current_context().exit(1)


def _answer(llm: LLM, jobs: list[Job], output: IO[str]) -> int:
    """Write one line a job, in order; returns how many failed."""
    from tqdm import tqdm

    finished: dict[int, Completion] = {}
    written = failed = num_tokens = 0
    prompts = [_rendered(llm, job) if job.is_chat else job.prompt for job in jobs]
    with tqdm(total=len(jobs), unit="prompt", disable=None) as bar:
        for index, completion in llm.iterate(prompts, [job.params for job in jobs], keep_going=True):
            finished[index] = completion
            num_tokens += len(completion.tokens)
            failed += completion.error is not None
            bar.set_postfix_str(f"{num_tokens} tokens")
            bar.update()
            while written in finished:
                output.write(json.dumps(_line(jobs[written], finished.pop(written)), ensure_ascii=False) + "\n")
                written += 1
            output.flush()
    return failed


def _rendered(llm: LLM, job: Job) -> Prompt:
    """A conversation as a prompt; `Refused` when the model's template is missing or cannot make one of it."""
    try:
        return llm.render_chat(job.prompt)
    except RequestRefused as refusal:
        raise Refused(f"line {job.line}: {refusal}") from None


def _line(job: Job, completion: Completion) -> dict[str, Any]:
    """One answer as it is written."""
    line: dict[str, Any] = {} if job.id is None else {"id": job.id}
    line |= {("messages" if job.is_chat else "prompt"): job.prompt}
    if completion.error is not None:
        return {**line, "error": completion.error}
    line |= {
        "text": completion.text,
        "finish_reason": completion.finish_reason.value,
        "prompt_tokens": len(completion.prompt_tokens),
        "completion_tokens": len(completion.tokens),
        "cached_tokens": completion.cached_tokens,
    }
    if completion.logprobs is not None:
        line["logprobs"] = [
            {"token": entry.token, "logprob": entry.logprob, "top": dict(entry.top)} for entry in completion.logprobs
        ]
    return line


def _sampling(text: str) -> dict[str, Any]:
    try:
        sampling = json.loads(text)
    except json.JSONDecodeError as error:
        raise Refused(f"--sampling is not JSON: {error}") from None
    if not isinstance(sampling, dict):
        raise Refused('--sampling must be a JSON object, such as {"temperature": 0}')
    return sampling


def _read_jobs(lines: IO[str], common: dict[str, Any]) -> Iterator[Job]:
    """The prompts of the input; `Refused` names the line of one that is malformed, before any weight is read."""
    is_jsonl = None
    for number, line in enumerate(lines, start=1):
        text = line.rstrip("\r\n")
        if not text.strip():
            continue
        if is_jsonl is None:
            is_jsonl = text.lstrip().startswith("{")
        yield _job(number, text, common) if is_jsonl else Job(number, text, False, _params(number, common))


def _job(number: int, text: str, common: dict[str, Any]) -> Job:
    try:
        entry = json.loads(text)
    except json.JSONDecodeError as error:
        raise Refused(f"line {number} is not JSON, as the first line is: {error}") from None
    if not isinstance(entry, dict) or len([key for key in PROMPT_KEYS if key in entry]) != 1:
        raise Refused(f'line {number}: it must be an object with either "prompt" or "messages"')
    own = {key: value for key, value in entry.items() if key not in (*PROMPT_KEYS, "id")}
    is_chat = "messages" in entry
    prompt = entry["messages" if is_chat else "prompt"]
    if not isinstance(prompt, str | list) or (is_chat and not isinstance(prompt, list)):
        raise Refused(f"line {number}: a prompt is text or a list of token ids, and messages are a list of objects")
    return Job(number, prompt, is_chat, _params(number, {**common, **own}), entry.get("id"))


def _params(number: int, given: dict[str, Any]) -> SamplingParams:
    try:
        return SamplingParams.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = ", ".join(SamplingParams.model_fields)
            raise Refused(f"line {number}: there is no sampling parameter {key!r}; there are: {known}") from None
        raise Refused(f"line {number}: {key}: {first['msg']}, not {first['input']!r}") from None
