"""Generation without a server: the Python API and `serve generate`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from swapserve import LLM, RequestRefused, SamplingParams
from swapserve.config import SettingsError

GREEDY = SamplingParams(max_tokens=12, temperature=0)
MEMORY = "256KiB"


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), kv_cache_memory_bytes=MEMORY)


@pytest.fixture(scope="module")
def answers(tiny_model: Path) -> dict[str, list[int]]:
    """Transformers' own greedy answers to a few prompts."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    found = {}
    for prompt in ("Hello", "The capital of France is", "x"):
        ids = torch.tensor([tokenizer.encode(prompt)])
        found[prompt] = model.generate(ids, do_sample=False, max_new_tokens=12)[0, ids.shape[1] :].tolist()
    return found


def test_answers_are_those_of_the_model_in_the_order_of_the_prompts(llm: LLM, answers: dict[str, list[int]]) -> None:
    done = llm.generate(list(answers), GREEDY)
    assert [completion.prompt for completion in done] == list(answers)
    assert [list(completion.tokens) for completion in done] == list(answers.values())
    assert [completion.text for completion in done] == [
        llm.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in answers.values()
    ]


@pytest.mark.parametrize(
    "policies",
    [
        {"scheduler": "static", "kv": "contiguous"},
        {"scheduler": "continuous", "kv": "paged", "speculator": "ngram"},
        {"scheduler": "chunked,chunk_size=5", "speculator": "draft,model=TINY,num_speculative_tokens=3"},
        {"enable_prefix_caching": False, "block_size": 4},
    ],
)
def test_policies_are_chosen_by_name_and_change_no_answer(
    tiny_model: Path, answers: dict[str, list[int]], policies: dict[str, object]
) -> None:
    given = {kind: str(text).replace("TINY", str(tiny_model)) for kind, text in policies.items()}
    other = LLM(str(tiny_model), kv_cache_memory_bytes=MEMORY, **given)
    assert [list(one.tokens) for one in other.generate(list(answers), GREEDY)] == list(answers.values())
    for kind, name in policies.items():
        if kind in ("scheduler", "kv", "speculator"):
            assert other.chosen[kind].startswith(str(name).partition(",")[0])


def test_a_single_prompt_may_be_text_or_tokens(llm: LLM) -> None:
    [from_text] = llm.generate("Hello", GREEDY)
    [from_tokens] = llm.generate(llm.tokenizer.encode("Hello"), GREEDY)
    assert from_text.tokens == from_tokens.tokens


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [GREEDY.model_copy(update={"max_tokens": number}) for number in (1, 3)]
    assert [len(one.tokens) for one in llm.generate(["a", "b"], params)] == [1, 3]
    with pytest.raises(ValueError, match="2 prompts and 1 sampling parameters"):
        llm.generate(["a", "b"], params[:1])


def test_the_stream_is_the_answer_in_pieces(llm: LLM) -> None:
    [whole] = llm.generate("Hello", GREEDY)
    assert "".join(llm.stream("Hello", GREEDY)) == whole.text


def test_a_stream_and_another_call_share_the_engine(llm: LLM) -> None:
    [whole] = llm.generate("Hello", GREEDY)
    pieces = llm.stream("Hello", GREEDY)
    begun = next(pieces)
    llm.generate(["a", "b"], GREEDY)
    assert begun + "".join(pieces) == whole.text


def test_a_stream_that_is_left_gives_its_slots_back(llm: LLM) -> None:
    pieces: Iterator[str] = llm.stream("Hello", GREEDY)
    next(pieces)
    assert llm._engine.has_work
    pieces.close()  # type: ignore[attr-defined]
    assert not llm._engine.has_work
    assert llm._engine.kv.usage() == 0


def test_a_stop_string_ends_the_answer_before_it(llm: LLM) -> None:
    [whole] = llm.generate("Hello", GREEDY)
    stop = whole.text[4:6]
    [stopped] = llm.generate("Hello", GREEDY.model_copy(update={"stop": (stop,)}))
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert stopped.finish_reason == "stop"
    assert len(stopped.tokens) < len(whole.tokens)
    assert not llm._engine.has_work


def test_a_conversation_goes_through_the_chat_template(llm: LLM) -> None:
    answer = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    assert llm.tokenizer.decode(answer.prompt_tokens) == "<s>user: hi\nassistant:"


def test_log_probabilities_are_one_a_token_when_asked_for(llm: LLM) -> None:
    [with_them] = llm.generate("Hello", GREEDY.model_copy(update={"logprobs": 2}))
    assert with_them.logprobs is not None
    assert [entry.token for entry in with_them.logprobs] == list(with_them.tokens)
    assert llm.generate("Hello", GREEDY)[0].logprobs is None


def test_one_prompt_that_can_never_run_refuses_all_and_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(RequestRefused, match="the prompt is empty"):
        llm.generate(["a", ""], GREEDY)
    assert not llm._engine.has_work


def test_a_setting_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SettingsError, match="there is no setting 'schedular'"):
        LLM("nowhere", schedular="static")


def lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_generate_answers_a_file_of_lines_in_order(serve, tiny_model: Path, tmp_path: Path, answers) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("".join(f"{prompt}\n\n" for prompt in answers))
    words = ["--input", str(prompts), "--output", str(out), "--max-tokens", "12", "--temperature", "0"]
    done = serve("generate", str(tiny_model), *words, "--kv-cache-memory-bytes", MEMORY)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    written = lines(out.read_text())
    assert [line["prompt"] for line in written] == list(answers)
    assert [line["completion_tokens"] for line in written] == [len(tokens) for tokens in answers.values()]
    assert {line["finish_reason"] for line in written} <= {"length", "stop"}
    assert "scheduler" in done.stderr, "what was chosen is shown"


def test_generate_reads_jsonl_with_parameters_of_each_prompt(serve, tiny_model: Path) -> None:
    asked = [
        {"id": "one", "prompt": "Hello", "max_tokens": 2, "temperature": 0, "logprobs": 1},
        {"id": 2, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
        {"prompt": [5, 6, 7]},
        {"id": "too long", "prompt": "x" * 400},
    ]
    stdin = "".join(json.dumps(line) + "\n" for line in asked)
    done = serve("generate", str(tiny_model), "--max-tokens", "1", "--sampling", '{"seed": 1}', stdin=stdin)
    assert done.returncode == 1
    assert "1 of 4 prompts were not answered" in done.stderr
    one, two, three, four = lines(done.stdout)
    assert (one["id"], one["completion_tokens"], len(one["logprobs"])) == ("one", 2, 2)
    assert (two["id"], two["completion_tokens"], two["messages"]) == (2, 3, asked[1]["messages"])
    assert (three["prompt"], three["completion_tokens"]) == ([5, 6, 7], 1)
    assert "the model's context is 256" in str(four["error"])


def test_generate_refuses_a_conversation_that_the_template_cannot_render(serve, tiny_model: Path) -> None:
    done = serve("generate", str(tiny_model), stdin='{"messages": [{"role": "user"}, "hi"]}\n')
    assert done.returncode == 2
    assert "Error: line 1: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_policy_that_refuses_its_options_is_named(serve, install, tiny_model: Path) -> None:
    source = """
from swapserve import Scheduler, hookimpl


class Odd(Scheduler):
    name = "odd"

    def __init__(self, options):
        raise ValueError("the moon is full")

    def schedule(self, plan):
        pass


@hookimpl
def swapserve_register_scheduler():
    return Odd
"""
    site = install("acme-odd", "scheduler_odd", source)
    done = serve("generate", str(tiny_model), "--scheduler", "odd", stdin="hi\n", PYTHONPATH=str(site))
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, "Error: scheduler 'odd': the moon is full")
