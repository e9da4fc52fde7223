"""The adapter against lm-eval's own `hf` model on the same weights, and alone where `hf` has no say."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from evaluation import lm_eval_model
from evaluation.generation import continue_prompts
from evaluation.lm_eval_model import OrthrosLM
from evaluation.model_source import load_evaluated_model
from evaluation.text_tokens import whole_text
from orthros_train.errors import InputError
from tests.distributed import run_distributed
from tests.evaluation.tiny_models import save_llama, save_merging_tokenizer, save_orthros

CONTEXTS = ("the cat sat on", "the cat sat on ", "", "<s>the dog", "another th", "the cat sat on the mat and then")
CONTINUATIONS = (" the mat", "ing on", "e cat", " dog sat on the cat")
WIDE = 256  # a window that sees all that the tiny model can read


def asked(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, each, index, metadata=("task", index, 1)) for index, each in enumerate(arguments)]


def scored_requests() -> list[Instance]:
    long = "the cat sat on the mat " * 60  # does not fit into 256 positions
    pairs = [(context, continuation) for context in (*CONTEXTS, long) for continuation in CONTINUATIONS]
    return asked("loglikelihood", *pairs)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "adds BOS"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = save_llama(tmp_path_factory.mktemp("llama") / "model")
    return save_merging_tokenizer(place, adds_bos=request.param)


@pytest.fixture(scope="module")
def harness(folder: Path) -> HFLM:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(folder), device="cpu", batch_size=4)


def both_arms(folder: Path, **options: Any) -> list[OrthrosLM]:
    arms = [load_evaluated_model(folder, dtype="fp32", base_window=window) for window in (None, WIDE)]
    assert [arm.model.config.architecture for arm in arms] == ["transformer", "orthros"]
    return [OrthrosLM(arm, **options) for arm in arms]


@pytest.mark.parametrize("batch_size", [1, 8, "auto"])
def test_log_likelihoods_equal_the_harness(folder: Path, harness: HFLM, batch_size: int | str) -> None:
    requests = scored_requests()
    expected = harness.loglikelihood(requests, disable_tqdm=True)
    for lm in both_arms(folder, batch_size=batch_size):
        found = lm.loglikelihood(requests)
        assert max(abs(a[0] - b[0]) for a, b in zip(found, expected, strict=True)) < 1e-3
        assert [a[1] for a in found] == [b[1] for b in expected]
        assert lm.truncated == {"task": len(CONTINUATIONS)}


def test_whole_texts_equal_the_harness(folder: Path, harness: HFLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """`hf` predicts a BOS that the tokenizer adds from another one; here BOS is context alone."""
    monkeypatch.setattr(harness, "_max_length", 16)
    encode = harness.tok_encode
    monkeypatch.setattr(harness, "tok_encode", lambda text: encode(text.removeprefix("<s>"), add_special_tokens=False))
    texts = ("the cat sat on the mat and the dog " * 4, "on", "</s> then", "<s>the dog")
    requests = asked("loglikelihood_rolling", *[(text,) for text in texts])
    expected = harness.loglikelihood_rolling(requests, disable_tqdm=True)
    for lm in both_arms(folder, batch_size=3, max_length=16):
        assert lm.loglikelihood_rolling(requests) == pytest.approx(expected, abs=2e-3)


def test_whole_texts_count_the_tokens_that_are_predicted(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = tokenizer.encode("the cat sat", add_special_tokens=False)
    assert whole_text(tokenizer, "the cat sat") == whole_text(tokenizer, "<s>the cat sat") == plain
    assert whole_text(tokenizer, "the cat sat", add_bos=True) == whole_text(tokenizer, "the cat sat", False) == plain


def test_generated_texts_equal_the_harness(folder: Path, harness: HFLM) -> None:
    calls = [(context, {"until": until, "max_gen_toks": n}) for context in CONTEXTS[:2] for until, n in (
        (["\n"], 12), (["at", "zz"], 12), ([], 5))]  # fmt: skip
    calls.append(("the mat " * 200, {"until": ["\n"], "max_gen_toks": 8}))  # longer than the model
    requests = asked("generate_until", *calls)
    expected = harness.generate_until(requests, disable_tqdm=True)
    for batch_size, chunk_size in ((1, 2048), (8, 7)):
        for lm in both_arms(folder, batch_size=batch_size, chunk_size=chunk_size):
            assert lm.generate_until(requests) == expected
            assert lm.truncated == {"task": 1}


def test_bos_stands_once(folder: Path) -> None:
    (lm, _) = both_arms(folder)
    bos, adds = lm.tokenizer.bos_token_id, lm.tokenizer("x").input_ids[0] == lm.tokenizer.bos_token_id
    assert lm.tok_encode("the cat").count(bos) == int(adds)
    assert lm.tok_encode("<s>the cat").count(bos) == 1
    assert lm.tok_encode("the cat", add_special_tokens=False).count(bos) == 0
    forced = OrthrosLM(lm.evaluated, add_bos_token=True)
    assert forced.tok_encode("<s>the cat").count(bos) == 1
    assert OrthrosLM(lm.evaluated, add_bos_token=False).tok_encode("the cat").count(bos) == 0
    assert lm.prefix_token_id == bos


@pytest.mark.parametrize("add_bos", [None, True, False])
def test_bos_where_it_is_asked_for_equals_the_harness(folder: Path, add_bos: bool | None) -> None:
    """Also where the tokenizer adds none by itself; `hf` hands the flag to the tokenizer."""
    given = {} if add_bos is None else {"add_bos_token": add_bos}
    theirs = HFLM(pretrained=str(folder), device="cpu", batch_size=4, dtype="float32", **given)
    ours = OrthrosLM(load_evaluated_model(folder, dtype="fp32"), batch_size=4, **given)
    for text in (*CONTEXTS, "</s>the cat"):
        assert ours.tok_encode(text) == theirs.tok_encode(text)
        assert ours.tok_encode(text, add_special_tokens=False) == theirs.tok_encode(text, add_special_tokens=False)
        if text:
            assert ours._encode_pair(text, " the mat") == theirs._encode_pair(text, " the mat")
    requests = scored_requests()
    expected = theirs.loglikelihood(requests, disable_tqdm=True)
    found = ours.loglikelihood(requests)
    assert max(abs(a[0] - b[0]) for a, b in zip(found, expected, strict=True)) < 1e-3


def test_bos_of_a_tokenizer_that_has_none_is_refused(folder: Path) -> None:
    evaluated = load_evaluated_model(folder, dtype="fp32")
    evaluated.tokenizer.bos_token = None
    with pytest.raises(InputError, match="has no BOS; leave it out"):
        OrthrosLM(evaluated, add_bos_token=True)


def test_a_continuation_that_merges_with_its_context_is_what_the_joint_encoding_has_behind_it(folder: Path) -> None:
    (lm, _) = both_arms(folder)
    context, continuation = lm._encode_pair("on the", " mat")
    assert lm.tokenizer.decode(continuation) == " mat"
    _, rest = lm._encode_pair("on th", "e cat")
    assert lm.tokenizer.decode(rest) == " cat"  # "e" became part of the context's last token
    spaced, moved = lm._encode_pair("on ", "the")
    assert (spaced, moved) == lm._encode_pair("on", " the")  # trailing spaces belong to the continuation
    assert context == lm.tok_encode("on the")


def test_chat_template(folder: Path) -> None:
    (lm, _) = both_arms(folder)
    messages = [{"role": "user", "content": "hello"}]
    assert lm.apply_chat_template(messages) == "[user] hello\n[assistant]"
    assert lm.chat_template(True) == lm.tokenizer.chat_template
    lm.tokenizer = AutoTokenizer.from_pretrained(folder)
    lm.tokenizer.chat_template = None
    with pytest.raises(InputError, match="has no chat template"):
        lm.apply_chat_template(messages)


NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}{% endfor %}"
)


def test_a_template_without_a_system_role_loses_the_system_message_as_in_the_harness(
    folder: Path, harness: HFLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    (lm, _) = both_arms(folder)
    for each in (lm, harness):
        monkeypatch.setattr(each.tokenizer, "chat_template", NO_SYSTEM)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert lm.apply_chat_template(messages) == harness.apply_chat_template(messages) == "[user] hello"
    lm.tokenizer.chat_template = "{{ raise_exception('never') }}"
    for history in (messages, messages[1:]):
        with pytest.raises(InputError, match="refuses the conversation: never"):
            lm.apply_chat_template(history)


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Generation runs out of memory with more than two prompts; gives the sizes of the batches that were tried."""
    tried: list[int] = []

    def generate(model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], *arguments: Any) -> list[str]:
        tried.append(len(prompts))
        if len(prompts) > 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return continue_prompts(model, tokenizer, prompts, *arguments)

    monkeypatch.setattr(lm_eval_model, "continue_prompts", generate)
    return tried


def test_an_automatic_batch_of_prompts_that_does_not_fit_is_halved(folder: Path, little_memory: list[int]) -> None:
    generation = {"until": ["zz"], "max_gen_toks": 4}
    contexts = ["the cat", "on the mat", "the dog sat", "and then", "the mat " * 200]
    requests = asked("generate_until", *[(context, generation) for context in contexts])
    evaluated = load_evaluated_model(folder, dtype="fp32")
    expected = OrthrosLM(evaluated, batch_size=1).generate_until(requests)
    little_memory.clear()
    lm = OrthrosLM(evaluated, batch_size="auto")
    assert lm.generate_until(requests) == expected
    assert max(little_memory) > 2 >= min(little_memory)
    assert lm.truncated == {"task": 1}
    with pytest.raises(InputError, match=r"out of memory with 5 prompt\(s\).*4 new ones; use a smaller --batch-size"):
        OrthrosLM(evaluated, batch_size=5).generate_until(requests)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("pretrained={},nonsense=1,dytpe=bf16", "--model_args dytpe, nonsense: not known; there are add_bos_token, "),
        ("pretrained={},give_up=1", "--model_args give_up: not known"),
        ("dtype=bf16", "names no model; give pretrained=DIR"),
    ],
)
def test_arguments_of_the_harness_command_line_that_are_none(folder: Path, arguments: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        OrthrosLM.create_from_arg_string(arguments.format(folder), {"batch_size": 1, "device": "cpu"})


def test_arguments_of_the_model_win_over_the_harness_options(folder: Path) -> None:
    given = {"pretrained": str(folder), "batch_size": "auto:4", "device": "cpu"}
    lm = OrthrosLM.create_from_arg_obj(given, {"batch_size": 1, "device": "cuda:0", "max_batch_size": None})
    assert (lm.batch_size, lm.model.device.type) == ("auto:4", "cpu")
    assert lm.loglikelihood(asked("loglikelihood", ("the", " cat")))[0][0] < 0


def test_a_tokenizer_without_bos_and_eos_is_refused(folder: Path) -> None:
    (lm, _) = both_arms(folder)
    lm.tokenizer = PreTrainedTokenizerFast(tokenizer_object=lm.tokenizer.backend_tokenizer)
    with pytest.raises(InputError, match="names neither BOS nor EOS; set eos_token"):
        lm.loglikelihood(asked("loglikelihood", ("the", " cat")))


def test_a_repeated_request_is_counted_once(folder: Path) -> None:
    """Under torchrun the harness repeats a rank's last request until all ranks have the same number."""
    (lm, _) = both_arms(folder, max_length=16)
    request, other = asked("loglikelihood", ("the cat sat " * 20, " on"), ("the dog sat " * 20, " on"))
    lm.loglikelihood([request, other, other, other])
    assert lm.truncated == {"task": 2}
    lm.loglikelihood([request])  # asked again, counted again
    assert lm.truncated == {"task": 3}
    (prompt,) = asked("generate_until", ("the cat sat " * 20, {"until": [], "max_gen_toks": 2}))
    lm.generate_until([prompt, prompt])
    assert lm.truncated == {"task": 4}


def test_answers_without_room_for_a_prompt_are_refused(folder: Path) -> None:
    """A greater length is proposed only where the model has one."""
    for lm, remedy in (
        (both_arms(folder, max_length=16)[0], "16; set a greater --max-length or choose tasks"),
        (both_arms(folder)[0], f"{both_arms(folder)[0].max_length}; choose tasks"),
    ):
        request = asked("generate_until", ("the", {"until": [], "max_gen_toks": lm.max_length}))
        with pytest.raises(InputError, match=f"leave no room for a prompt within {remedy}"):
            lm.generate_until(request)


def test_the_model_type_is_known_to_the_harness() -> None:
    assert get_model("orthros") is OrthrosLM


def test_it_is_made_from_the_harness_command_line(folder: Path) -> None:
    lm = OrthrosLM.create_from_arg_string(
        f"pretrained={folder},base_window=16,dtype=bf16,max_length=64,share_prefix=False",
        {"batch_size": "2", "max_batch_size": None, "device": "cpu"},
    )
    assert (lm.model.config.base_window, lm.model.dtype, lm.max_length) == (16, torch.bfloat16, 64)
    assert lm.get_model_info()["architecture"] == "orthros"
    assert lm.loglikelihood(asked("loglikelihood", ("the", " cat")))[0][0] < 0


def test_a_continuation_longer_than_the_model_is_refused(folder: Path) -> None:
    (lm, _) = both_arms(folder, max_length=4)
    with pytest.raises(InputError, match="exceeds the model's 4"):
        lm.loglikelihood(asked("loglikelihood", ("the", " cat sat on the mat and the dog")))
    with pytest.raises(InputError, match="no room for a prompt"):
        lm.generate_until(asked("generate_until", ("the", {"until": [], "max_gen_toks": 4})))


def test_a_continuation_that_vanishes_in_its_context_is_named(folder: Path) -> None:
    (lm, _) = both_arms(folder)
    with pytest.raises(InputError, match=r"'on th' and the continuation 'e'.*no token of its own"):
        lm.loglikelihood(asked("loglikelihood", ("on th", "e")))


def test_cached_answers_are_offered_to_the_harness(folder: Path) -> None:
    (lm, _) = both_arms(folder)
    kept: list[tuple[str, Any]] = []

    class Hook:
        def add_partial(self, kind: str, key: Any, value: Any) -> None:
            kept.append((kind, value))

    lm.set_cache_hook(Hook())  # type: ignore[arg-type]
    scores = lm.loglikelihood(asked("loglikelihood", ("the", " cat")))
    texts = lm.generate_until(asked("generate_until", ("the", {"until": [], "max_gen_toks": 2})))
    sums = lm.loglikelihood_rolling(asked("loglikelihood_rolling", ("the cat",)))
    assert kept == [("loglikelihood", scores[0]), ("generate_until", texts[0]), ("loglikelihood_rolling", sums[0])]


def on_ranks(folder: Path) -> Callable[[], Any]:
    def work() -> Any:
        torch.set_num_threads(1)
        lm = OrthrosLM(str(folder), batch_size=4, dtype="fp32")
        mine = scored_requests()[lm.rank :: lm.world_size]
        scores = lm.loglikelihood(mine)
        numbers = lm.all_gather(torch.tensor(lm.rank + 10)).tolist()
        lm.barrier()
        return numbers, lm.gather_object(scores)

    return work


def test_ranks_share_the_requests(tmp_path: Path) -> None:
    place = save_orthros(tmp_path / "model")
    alone: Sequence[Any] = OrthrosLM(str(place), batch_size=4, dtype="fp32").loglikelihood(scored_requests())
    (first, gathered), (second, nothing) = run_distributed(on_ranks(place), 2)
    assert first == second == [10, 11]
    assert nothing is None
    together: list[Any] = [None] * len(alone)
    together[0::2], together[1::2] = gathered
    assert [score for score, _ in together] == pytest.approx([score for score, _ in alone], abs=1e-4)


def test_random_requests_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    rng = random.Random(3)
    words = ["".join(rng.choice("abcdef ") for _ in range(rng.randrange(1, 60))) for _ in range(12)]
    requests = asked("loglikelihood", *[(a, " " + b) for a in words[:4] for b in words[4:]])
    evaluated = load_evaluated_model(save_orthros(tmp_path / "model"), dtype="fp32")
    one, eight, auto = (OrthrosLM(evaluated, batch_size=size).loglikelihood(requests) for size in (1, 8, "auto"))
    for other in (eight, auto):
        assert max(abs(a[0] - b[0]) for a, b in zip(one, other, strict=True)) < 1e-3
