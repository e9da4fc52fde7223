"""The two streams: equality with Llama, output positions, windows, packing, padding, labels (docs/method.md)."""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from orthros_train.model import KVCache, OrthrosForCausalLM
from orthros_train.model.stream_plan import plan_streams
from tests.model.tiny import SHAPE, assert_close, tiny_config, tiny_model, token_ids

ARMS = [
    {"architecture": "orthros"},
    {"architecture": "orthros", "base_sinks": 2},
    {"architecture": "orthros", "query_affine": "none"},
    {"architecture": "transformer"},
    {"architecture": "transformer", "base_sinks": 1},
    {"architecture": "transformer", "base_window": None},
]
arms = pytest.mark.parametrize("arm", ARMS, ids=lambda arm: "-".join(str(value) for value in arm.values()))


# --- equality with the source architecture (invariant 1) ---


@pytest.mark.parametrize("architecture", ["orthros", "transformer"])
@pytest.mark.parametrize("window", [40, 64, None])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention_bias": True},
        {"tie_word_embeddings": True},
        {"head_dim": 16},
        {"num_key_value_heads": 1},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}},
    ],
    ids=str,
)
def test_a_wide_window_and_identity_affines_equal_llama(architecture, window, options):
    model = OrthrosForCausalLM(tiny_config(architecture=architecture, base_window=window, **options)).eval()
    model.reset_parameters(seed=3)
    llama = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **options}, rms_norm_eps=1e-5)).eval()
    loaded = llama.load_state_dict(model.state_dict(), strict=False)
    assert not loaded.missing_keys
    assert all("_query." in key for key in loaded.unexpected_keys)
    ids = token_ids(2, 40)
    with torch.no_grad():
        assert_close(model(ids).logits, llama(ids).logits, 1e-5)


@pytest.mark.parametrize("architecture", ["orthros", "transformer"])
def test_query_and_key_norms_equal_qwen3(architecture):
    model = OrthrosForCausalLM(tiny_config(architecture=architecture, base_window=64, qk_norm=True, head_dim=16)).eval()
    model.reset_parameters(seed=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.copy_(torch.linspace(0.5, 1.5, 16))
    qwen = Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, "head_dim": 16}, rms_norm_eps=1e-5)).eval()
    assert not qwen.load_state_dict(model.state_dict(), strict=False).missing_keys
    ids = token_ids(2, 40)
    with torch.no_grad():
        assert_close(model(ids).logits, qwen(ids).logits, 1e-5)


def test_the_two_arms_share_every_common_weight():
    orthros, transformer = (
        OrthrosForCausalLM(tiny_config()),
        OrthrosForCausalLM(tiny_config(architecture="transformer")),
    )
    orthros.reset_parameters(7)
    transformer.reset_parameters(7)
    ours = orthros.state_dict()
    assert all(torch.equal(ours[name], value) for name, value in transformer.state_dict().items())
    transformer.reset_parameters(8)
    assert not torch.equal(ours["model.layers.0.mlp.up_proj.weight"], transformer.model.layers[0].mlp.up_proj.weight)


# --- the reference: layers written out with dense masks ---


def naive_forward(model, ids, document_ids=None):
    """The equations of docs/method.md for one row, in whole tensors: no kernels, no dead code left out."""
    config = model.config
    T, H, G, d = len(ids), config.num_attention_heads, config.num_key_value_heads, config.head_dim
    segment = torch.zeros(T, dtype=torch.int64) if document_ids is None else document_ids
    first = torch.tensor(
        [next(s for s in range(t, -1, -1) if s == 0 or segment[s - 1] != segment[t]) for t in range(T)]
    )
    t, j = torch.arange(T)[:, None], torch.arange(T)[None]
    history = (j <= t) & (j >= first[:, None])
    window = history
    if config.base_window is not None:
        window = history & ((j > t - config.base_window) | (j < first[:, None] + config.base_sinks))
    inverse = 1 / config.rope_parameters["rope_theta"] ** (torch.arange(0, d, 2).float() / d)
    angle = (torch.arange(T) - first).float()[:, None] * inverse
    cos, sin = torch.cat((angle.cos(),) * 2, -1).to(model.dtype), torch.cat((angle.sin(),) * 2, -1).to(model.dtype)

    def norm(x, module):
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * module.weight

    def rope(x):  # (T, heads, d)
        half = d // 2
        return x * cos[:, None] + torch.cat((-x[..., half:], x[..., :half]), -1) * sin[:, None]

    def affine(q, module):
        if config.query_affine == "none":
            return q
        return module.gain.view(H, d) * q + module.shift.view(H, d)

    def attention(q, k, v, mask):
        k, v = k.repeat_interleave(H // G, 1), v.repeat_interleave(H // G, 1)
        scores = torch.einsum("thd,shd->hts", q, k) / d**0.5
        return torch.einsum("hts,shd->thd", scores.masked_fill(~mask, float("-inf")).softmax(-1), v).flatten(1)

    X = Y = model.model.embed_tokens.weight[ids]
    for index, layer in enumerate(model.model.layers):
        attn, last = layer.self_attn, index == config.num_hidden_layers - 1
        x, y = norm(X, layer.input_layernorm), norm(Y, layer.input_layernorm)
        k = rope(attn.k_proj(x).view(T, G, d))
        v = attn.v_proj(x).view(T, G, d)
        if config.architecture == "transformer" or not last:
            q_x = rope(affine(attn.q_proj(x).view(T, H, d), attn.base_query))
            X = X + attn.o_proj(attention(q_x, k, v, window))
            X = X + layer.mlp(norm(X, layer.post_attention_layernorm))
        q_y = rope(affine(attn.q_proj(y).view(T, H, d), attn.output_query))
        Y = Y + attn.o_proj(attention(q_y, k, v, history))
        Y = Y + layer.mlp(norm(Y, layer.post_attention_layernorm))
    return model.lm_head(norm(X if config.architecture == "transformer" else Y, model.model.norm))


@arms
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@torch.no_grad()
def test_logits_equal_the_equations(arm, kernel):
    model = tiny_model(attention_kernel=kernel, **arm)
    ids = token_ids(2, 17)
    expected = torch.stack([naive_forward(model, row) for row in ids])
    assert_close(model(ids).logits, expected)


@arms
@torch.no_grad()
def test_packed_documents_equal_the_equations(arm):
    model = tiny_model(**arm)
    ids = token_ids(2, 20)
    documents = torch.tensor([[0] * 7 + [1] * 12 + [2], [5] * 20])
    expected = torch.stack([naive_forward(model, row, ids_of) for row, ids_of in zip(ids, documents, strict=True)])
    assert_close(model(ids, document_ids=documents).logits, expected)


# --- output positions (invariant 4) ---


@arms
@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_output_positions_pick_from_output_everywhere(arm, packed):
    model = tiny_model(**arm)
    ids = token_ids(3, 23)
    documents = (torch.arange(23) // 9).expand(3, -1) if packed else None
    everywhere = model(ids, document_ids=documents).logits
    positions = torch.tensor([[0, 4, 5, 22], [3, 21, -1, -1], [-1, -1, -1, -1]])
    some = model(ids, output_positions=positions, document_ids=documents).logits
    for row in range(3):
        for slot, position in enumerate(positions[row].tolist()):
            if position >= 0:
                assert_close(some[row, slot], everywhere[row, position])
    assert some.isfinite().all()


@arms
@torch.no_grad()
def test_logits_to_keep_means_the_last_columns(arm):
    model = tiny_model(**arm)
    ids = token_ids(2, 19)
    everywhere = model(ids).logits
    for keep in (1, 4, 19, 30):
        assert_close(model(ids, logits_to_keep=keep).logits, everywhere[:, -keep:])


@pytest.mark.parametrize("packed", [False, True])
def test_unused_slots_read_one_key(packed):
    """They widen no block of another row's used slots, and a block of them alone reads next to nothing."""
    model, T = tiny_model(), 900
    documents = (torch.arange(T) // 300).expand(2, -1) if packed else None
    used = torch.arange(650, 850)  # more than a block of 192
    positions = torch.full((2, 500), -1)
    positions[0, :200], positions[1, :10] = used, used[:10]
    plan = plan_streams(
        *(model.config, model.model.rotary_emb, "sdpa", 2, T, torch.float32, torch.device("cpu")),
        output_columns=positions,
        document_ids=documents,
    )
    sizes = []
    for block in plan.output.visibility.blocks(T, torch.float32):
        (keys,) = block.keys
        sizes.append(keys.stop - keys.start if isinstance(keys, slice) else keys.shape[1])
    first = 600 if packed else 0
    assert sizes == [842 - first, 850 - first, 1]


def test_an_unused_slot_has_no_gradient():
    model = tiny_model().train()
    ids = token_ids(2, 9)
    gradients = []
    for positions in ([[2, 6], [4, 7]], [[2, 6, -1, -1], [4, 7, -1, -1]]):
        model.zero_grad()
        labels = token_ids(2, 9, seed=1)
        loss = model(ids, output_positions=torch.tensor(positions), labels=labels).loss
        loss.backward()
        gradients.append([loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([[3, 2]], "increase"),
        ([[3, 3]], "increase"),
        ([[-1, 3]], "increase"),
        ([[0, 9]], "lie in"),
        ([[-2, 3]], "lie in"),
        ([0, 1], r"\(B, M\)"),
    ],
)
def test_wrong_output_positions_are_refused(positions, message):
    with pytest.raises(ValueError, match=message):
        tiny_model()(token_ids(1, 9), output_positions=torch.tensor(positions))


@pytest.mark.parametrize("mask", [[[0, 0, 1, 1, 1, 1]], [[1, 1, 1, 1, 0, 0]], [[1, 1, 0, 1, 0, 1]]])
def test_output_positions_on_padding_are_refused(mask):
    model, ids = tiny_model(), token_ids(1, 6)
    for column, real in enumerate(mask[0]):
        positions = torch.tensor([[column, -1]])
        if real:
            assert model(ids, attention_mask=torch.tensor(mask), output_positions=positions).logits.isfinite().all()
            continue
        with pytest.raises(ValueError, match="must not lie on padding"):
            model(ids, attention_mask=torch.tensor(mask), output_positions=positions)


# --- what a token can see (invariants 5 and 11) ---


@torch.no_grad()
def test_the_window_of_the_first_layer_ends_exactly_at_w():
    """Perturbing token t-w leaves O_x[t] of layer 1 alone; perturbing t-w+1 changes it."""
    model = tiny_model(base_window=5)
    attention = model.model.layers[0].self_attn
    t, seen = 12, {}
    attention.register_forward_hook(lambda module, args, output: seen.update(base=output[:, :20].clone()))
    ids = token_ids(1, 20)
    model(ids)
    before = seen["base"]
    for distance, changes in ((5, False), (4, True)):
        other = ids.clone()
        other[0, t - distance] = (other[0, t - distance] + 1) % 61
        model(other)
        assert torch.equal(before[0, t], seen["base"][0, t]) is not changes


@arms
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@torch.no_grad()
def test_editing_a_document_leaves_the_others_unchanged(arm, kernel):
    model = tiny_model(attention_kernel=kernel, **arm)
    ids, documents = token_ids(1, 24), torch.tensor([[0] * 10 + [1] * 9 + [0] * 5])
    streams = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, output: streams.append(output.clone()))
    before = model(ids, document_ids=documents).logits
    layers_before = list(streams)
    streams.clear()
    other = ids.clone()
    other[0, :10] = (other[0, :10] + 7) % 61
    after = model(other, document_ids=documents).logits
    assert torch.equal(before[:, 10:], after[:, 10:])
    assert not torch.equal(before[:, :10], after[:, :10])
    for one, two in zip(layers_before, streams, strict=True):
        for stream_one, stream_two in zip(one.split(24, dim=1), two.split(24, dim=1), strict=True):
            assert torch.equal(stream_one[:, 10:], stream_two[:, 10:])


# --- padding ---


@arms
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padded_rows_equal_single_rows(arm, side):
    model = tiny_model(**arm)
    lengths, T = [1, 6, 13], 13
    ids, mask = token_ids(3, T), torch.zeros(3, T, dtype=torch.int64)
    for row, length in enumerate(lengths):
        mask[row, T - length :] = 1 if side == "left" else 0
        if side == "right":
            mask[row, :length] = 1
    batch = model(ids, attention_mask=mask).logits
    last = model(ids, attention_mask=mask, logits_to_keep=1).logits if side == "left" else None
    for row, length in enumerate(lengths):
        columns = mask[row].bool()
        alone = model(ids[row : row + 1, columns]).logits[0]
        assert_close(batch[row, columns], alone)
        if last is not None:
            assert_close(last[row, 0], alone[-1])
        positions = columns.nonzero().flatten()[[0, length // 2]].unique()[None]
        some = model(ids[row : row + 1], attention_mask=mask[row : row + 1], output_positions=positions).logits
        assert_close(some[0], alone[[0, length // 2]].unique_consecutive(dim=0) if length > 1 else alone[:1])


@arms
def test_a_fully_padded_row_is_finite(arm):
    model = tiny_model(**arm).train()
    ids, mask = token_ids(2, 8), torch.ones(2, 8, dtype=torch.int64)
    mask[1] = 0
    output = model(ids, attention_mask=mask, labels=ids)
    output.loss.backward()
    assert output.logits.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@torch.no_grad()
def test_padding_and_packing_together():
    model = tiny_model()
    ids, documents = token_ids(1, 16), torch.tensor([[9] * 3 + [0] * 6 + [1] * 7])
    mask = torch.tensor([[0] * 3 + [1] * 13])
    padded = model(ids, document_ids=documents, attention_mask=mask).logits
    assert_close(padded[:, 3:], model(ids[:, 3:], document_ids=documents[:, 3:]).logits)


# --- loss ---


def test_labels_are_unshifted_and_segment_aware():
    model = tiny_model()
    ids = token_ids(2, 12)
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
    labels = ids.clone()
    labels[1, 3] = -100
    output = model(ids, document_ids=documents, labels=labels)
    log_probabilities = output.logits.log_softmax(-1)
    terms = [
        -log_probabilities[b, t, labels[b, t + 1]]
        for b in range(2)
        for t in range(11)
        if documents[b, t] == documents[b, t + 1] and labels[b, t + 1] != -100
    ]
    assert len(terms) == 10 + 10
    assert_close(output.loss, torch.stack(terms).mean())
    summed = model(ids, document_ids=documents, labels=labels, num_items_in_batch=5).loss
    assert_close(summed, torch.stack(terms).sum() / 5)


def test_accumulated_micro_batches_weigh_labels_equally():
    """num_items_in_batch, which transformers' Trainer passes: no mean of means under gradient accumulation."""
    model = tiny_model()
    assert model.accepts_loss_kwargs
    ids = token_ids(4, 12)
    labels = ids.clone()
    labels[0, 2:], labels[1, 9:] = -100, -100
    items = (labels[:, 1:] != -100).sum()
    whole = model(ids, labels=labels).loss
    parts = sum(model(ids[i : i + 1], labels=labels[i : i + 1], num_items_in_batch=items).loss for i in range(4))
    assert_close(parts, whole)


def test_labels_at_output_positions_and_shift_labels_agree():
    model = tiny_model()
    ids = token_ids(2, 12)
    positions = torch.tensor([[1, 4, 11], [2, -1, -1]])
    by_labels = model(ids, output_positions=positions, labels=ids).loss
    shifted = torch.tensor([[ids[0, 2], ids[0, 5], -100], [ids[1, 3], -100, -100]])
    assert_close(model(ids, output_positions=positions, shift_labels=shifted).loss, by_labels)


def test_padding_is_no_label():
    model = tiny_model()
    ids = token_ids(1, 8)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    assert_close(model(ids, attention_mask=mask, labels=ids).loss, model(ids[:, 3:], labels=ids[:, 3:]).loss)


def test_no_valid_label_is_a_zero_loss_not_nan():
    model = tiny_model()
    ids = token_ids(1, 8)
    loss = model(ids, labels=torch.full_like(ids, -100)).loss
    assert loss == 0
    loss.backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_losses_are_computed_in_single(dtype):
    model = tiny_model(dtype, initializer_range=0.05)
    ids = token_ids(2, 40)
    output = model(ids, labels=ids)
    assert (output.logits.dtype, output.loss.dtype) == (dtype, torch.float32)
    expected = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    assert_close(output.loss, expected, 1e-6)


@pytest.mark.parametrize("return_logits", [True, False], ids=["logits", "loss alone"])
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@arms
def test_autocast_follows_single_precision(arm, checkpointing, packed, return_logits):
    """As transformers' Trainer runs with bf16: weights stay float32, products are bfloat16, in both directions."""
    ids = token_ids(2, 40)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False, "return_logits": return_logits}
    if packed:
        batch["document_ids"] = torch.arange(40).div(15, rounding_mode="floor").expand(2, 40)
    results = []
    for enabled in (False, True):
        model = tiny_model(torch.float32, **arm, qk_norm=True, initializer_range=0.1).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = model(**batch).loss
        loss.backward()
        results.append((loss, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])))
    (expected, gradient), (loss, cast_gradient) = results
    assert loss.dtype == cast_gradient.dtype == torch.float32
    assert_close(loss, expected, 0.01)
    assert (cast_gradient - gradient).norm() < 0.03 * gradient.norm()


# --- dead code and options ---


@pytest.mark.parametrize("architecture", ["orthros", "transformer"])
@torch.no_grad()
def test_the_last_layer_computes_only_what_logits_need(architecture):
    """Rows that each projection of the last layer multiplies: K and V for T base tokens, the rest for M outputs."""
    model = tiny_model(architecture=architecture)
    rows = {}
    for name, module in model.model.layers[-1].named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda module, args, output, name=name: rows.update({name: output.shape[1]}))
    model(token_ids(1, 20), output_positions=torch.tensor([[3, 19]]))
    assert rows.pop("self_attn.k_proj") == rows.pop("self_attn.v_proj") == 20
    assert set(rows.values()) == {2}
    assert not any("base_query" in name for name, _ in model.model.layers[-1].named_parameters())


def test_gradient_checkpointing_changes_nothing():
    model = tiny_model().train()
    ids = token_ids(2, 11)

    def gradients():
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = gradients()
    model.activation_checkpointing_enable()
    assert all(torch.equal(one, two) for one, two in zip(plain, gradients(), strict=True))


def test_inputs_embeds_and_position_ids():
    model = tiny_model()
    ids = token_ids(2, 9)
    with torch.no_grad():
        plain = model(ids).logits
        assert_close(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, plain)
        assert_close(model(ids, position_ids=torch.arange(9)[None]).logits, plain)
        assert_close(
            model(ids, position_ids=torch.arange(100, 109)[None]).logits, plain, 1e-4
        )  # relative, float32 angles
        assert not torch.allclose(model(ids, position_ids=2 * torch.arange(9)[None]).logits, plain)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": None}, "either input_ids or inputs_embeds"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, "at least one token"),
        ({"output_positions": torch.tensor([[1]]), "logits_to_keep": 1}, "either output_positions"),
        ({"document_ids": torch.zeros(1, 4), "use_cache": True}, "no cache"),
        ({"logits_to_keep": -1}, "must not be negative"),
        ({"labels": torch.zeros(1, 4), "shift_labels": torch.zeros(1, 4)}, "either labels or shift_labels"),
        ({"attention_mask": torch.ones(1, 3)}, "attention_mask must be"),
    ],
)
def test_contradicting_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny_model()(**{"input_ids": token_ids(1, 4), **arguments})


def test_a_foreign_cache_is_refused():
    model = tiny_model()
    with pytest.raises(TypeError, match="KVCache"):
        model(token_ids(1, 4), cache=DynamicCache())
    with pytest.raises(ValueError, match="same argument"):
        model(token_ids(1, 4), cache=KVCache(model.config), past_key_values=KVCache(model.config))
    with pytest.raises(RuntimeError, match="no_grad"):
        model(token_ids(1, 4), use_cache=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_window": 0}, "base_window=0"),
        ({"base_window": -3}, "base_window=-3"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"head_dim": 7}, "odd"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be positive"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0 must be positive"),
        ({"hidden_size": -32}, "hidden_size=-32 must be positive"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be positive"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0 must be positive"),
        ({"num_hidden_layers": 10**30}, f"num_hidden_layers={10**30} must be at most 10000"),
        ({"architecture": "rnn"}, "architecture='rnn'"),
        ({"architecture": "transformer", "query_affine": "elementwise"}, "no query affine"),
        ({"base_sinks": 2, "base_window": None}, "needs a base_window"),
        ({"attention_kernel": "magic"}, "attention_kernel='magic'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_type='longrope'"),
    ],
)
def test_impossible_configurations_are_refused(changes, message):
    with pytest.raises(Exception, match=message):
        tiny_config(**changes)
