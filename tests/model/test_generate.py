"""`generate` through transformers: what it produces, and that a row costs prompt + generated base tokens."""

import re

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TextIteratorStreamer

from orthros_train.model import KVCache
from orthros_train.model.kv_cache import KVCacheLayer
from tests.model import tiny
from tests.model.tiny import tiny_model

ARMS = ["orthros", "transformer"]


def token_ids(rows, columns, seed=0):
    """Prompts without id 0, which is the padding here."""
    return tiny.token_ids(rows, columns, seed).clamp(min=1)


def byte_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


def model_for_generation(architecture="orthros", **changes):
    model = tiny_model(torch.float32, architecture=architecture, **changes)
    model.generation_config.pad_token_id = 0
    return model


def greedy_by_hand(model, prompt, count):
    ids = prompt
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat((ids, model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)), dim=1)
    return ids


def count_base_tokens(model):
    """Base tokens that the first layer's K projection saw, over all rows."""
    seen = []
    projection = model.model.layers[0].self_attn.k_proj
    projection.register_forward_hook(lambda module, args, output: seen.append(output.shape[0] * output.shape[1]))
    return seen


@pytest.mark.parametrize("architecture", ARMS)
@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_equals_the_full_forward_at_every_step(architecture, use_cache):
    model = model_for_generation(architecture)
    prompt = token_ids(2, 7)
    generated = model.generate(prompt, max_new_tokens=12, do_sample=False, use_cache=use_cache)
    assert torch.equal(generated, greedy_by_hand(model, prompt, 12))


@pytest.mark.parametrize("architecture", ARMS)
@pytest.mark.parametrize("beams", [1, 3])
def test_left_padded_prompts_equal_single_runs(architecture, beams):
    model = model_for_generation(architecture)
    lengths, width = (1, 5, 9), 9
    ids, mask = token_ids(3, width), torch.zeros(3, width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        mask[row, width - length :] = 1
    options = {"max_new_tokens": 10, "do_sample": False, "num_beams": beams}
    batch = model.generate(ids, attention_mask=mask, **options)[:, width:]
    for row, length in enumerate(lengths):
        alone = model.generate(ids[row : row + 1, width - length :], **options)[0, length:]
        assert torch.equal(batch[row], alone)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_row_costs_prompt_and_generated_base_tokens(beams):
    model = model_for_generation()
    seen = count_base_tokens(model)
    model.generate(token_ids(2, 30), max_new_tokens=8, do_sample=False, num_beams=beams)
    assert sum(seen) == 2 * beams * (30 + 8 - 1)  # the last generated token is never read


def test_generate_makes_its_own_cache_sized_once():
    model = model_for_generation()
    output = model.generate(token_ids(1, 10), max_new_tokens=100, do_sample=False, return_dict_in_generate=True)
    assert isinstance(output.cache, KVCache)
    assert output.cache.lengths.tolist() == [109]
    assert output.cache.layers[0].keys.shape[2] == 128


@pytest.mark.parametrize("options", [{"max_new_tokens": 300}, {"max_length": 900}, {"num_beams": 2, "max_length": 680}])
def test_generate_copies_its_cache_at_no_step(options, monkeypatch):
    """It knows how long the text can become; beams are reordered, which is a copy, but never grown."""
    grown = []
    grow = KVCacheLayer.grow
    monkeypatch.setattr(KVCacheLayer, "grow", lambda layer, size: (grown.append(size), grow(layer, size)))
    model = model_for_generation()
    model.generate(token_ids(1, 600), do_sample=False, prefill_chunk_size=128, **options)
    assert len(grown) == len(model.model.layers)


def test_generation_continues_from_a_cache():
    model = model_for_generation()
    prompt = token_ids(1, 12)
    whole = model.generate(prompt, max_new_tokens=6, do_sample=False)
    _, cache = model.prefill(prompt[:, :8])
    seen = count_base_tokens(model)
    assert torch.equal(model.generate(prompt, cache=cache, max_new_tokens=6, do_sample=False), whole)
    assert sum(seen) == 4 + 5


def test_chunked_prefill_in_generate_changes_nothing():
    model = model_for_generation()
    prompt = token_ids(2, 23)
    plain = model.generate(prompt, max_new_tokens=5, do_sample=False)
    assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False, prefill_chunk_size=4), plain)


@pytest.mark.parametrize("options", [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}])
def test_sampling_is_repeatable_by_seed_and_obeys_its_options(options):
    model = model_for_generation()
    prompt = token_ids(1, 6)

    def sample(seed):
        torch.manual_seed(seed)
        return model.generate(prompt, max_new_tokens=16, do_sample=True, num_return_sequences=3, **options)

    assert torch.equal(sample(1), sample(1))
    assert not torch.equal(sample(1), sample(2))
    assert sample(1).shape == (3, 22)
    if options == {"top_k": 5}:
        for row in sample(1):
            for position in range(6, 22):
                with torch.no_grad():
                    best = model(row[None, :position]).logits[0, -1].topk(5).indices
                assert row[position] in best


def test_several_samples_of_one_prompt_are_the_same_as_repeated_prompts():
    model = model_for_generation()
    prompt = token_ids(2, 6)
    torch.manual_seed(3)
    samples = model.generate(prompt, max_new_tokens=5, do_sample=True, num_return_sequences=2)
    torch.manual_seed(3)
    assert torch.equal(samples, model.generate(prompt.repeat_interleave(2, 0), max_new_tokens=5, do_sample=True))


def test_a_stop_string_may_span_tokens():
    model = model_for_generation(vocab_size=256)
    tokenizer = byte_tokenizer()
    prompt = token_ids(1, 5)
    others = [token for token in range(256) if not re.fullmatch("[A-Za-z]", tokenizer.decode([token]))]
    options = {"max_new_tokens": 30, "suppress_tokens": others}
    free = tokenizer.decode(model.generate(prompt, do_sample=False, **options)[0, 5:])
    stop = free[7:10]
    stopped = model.generate(prompt, do_sample=False, stop_strings=[stop], tokenizer=tokenizer, **options)[0, 5:]
    assert tokenizer.decode(stopped) == free[: free.index(stop) + 3]


def test_an_end_token_stops_each_row_on_its_own():
    model = model_for_generation()
    prompt = token_ids(2, 7)
    free = model.generate(prompt, max_new_tokens=12, do_sample=False)[:, 7:]
    end = int(free[0, 3])
    stopped = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=end)[:, 7:]
    for row in range(2):
        length = int((free[row] == end).nonzero()[0]) + 1 if end in free[row] else 12
        assert torch.equal(stopped[row, :length], free[row, :length])
        assert (stopped[row, length:] == 0).all()


def test_streaming_gives_the_same_text():
    model = model_for_generation(vocab_size=256)
    tokenizer = byte_tokenizer()
    prompt = token_ids(1, 5)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    generated = model.generate(prompt, max_new_tokens=20, do_sample=False, streamer=streamer)
    assert "".join(streamer) == tokenizer.decode(generated[0, 5:])


def test_generation_from_embeddings():
    model = model_for_generation()
    prompt = token_ids(2, 7)
    embeds = model.get_input_embeddings()(prompt)
    generated = model.generate(inputs_embeds=embeds, max_new_tokens=8, do_sample=False)
    assert torch.equal(generated, model.generate(prompt, max_new_tokens=8, do_sample=False)[:, 7:])


def test_prompt_lookup_decoding_rolls_the_cache_back():
    model = model_for_generation()
    prompt = token_ids(1, 6).repeat(1, 4)
    plain = model.generate(prompt, max_new_tokens=20, do_sample=False)
    assert torch.equal(model.generate(prompt, max_new_tokens=20, do_sample=False, prompt_lookup_num_tokens=4), plain)


def test_the_dynamic_cache_of_transformers_means_ours():
    model, prompt = model_for_generation(), token_ids(1, 4)
    options = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    assert isinstance(model.generate(prompt, cache_implementation="dynamic", **options).cache, KVCache)


def test_another_cache_implementation_is_refused():
    with pytest.raises(ValueError, match="one cache"):
        model_for_generation().generate(token_ids(1, 4), max_new_tokens=2, cache_implementation="static")
