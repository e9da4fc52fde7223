"""The schema, its loader and its one-line errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orthros_train.config import Config, config_to_yaml, gradient_accumulation_steps, load_config, orthros_config
from orthros_train.config.parallel import check_pipeline_size, check_tensor_size, data_parallel_size
from orthros_train.errors import InputError

MINIMAL = """\
output_dir: outputs/x
model: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4, base_window: 8}
train: {steps: 100, micro_batch_size: 2, global_batch_size: 8, sequence_length: 32}
"""

REQUIRED = "required"
OPTIONS = {
    "task": "pretrain",
    "output_dir": REQUIRED,
    "init_from": None,
    "precision": "bf16",
    "model.architecture": "orthros",
    "model.vocab_size": None,
    "model.hidden_size": REQUIRED,
    "model.intermediate_size": REQUIRED,
    "model.num_hidden_layers": REQUIRED,
    "model.num_attention_heads": REQUIRED,
    "model.num_key_value_heads": None,
    "model.head_dim": None,
    "model.max_position_embeddings": 2048,
    "model.rms_norm_eps": 1e-5,
    "model.rope_theta": 10000.0,
    "model.rope_scaling": None,
    "model.rope_scaling.rope_type": REQUIRED,
    "model.rope_scaling.factor": None,
    "model.rope_scaling.original_max_position_embeddings": None,
    "model.rope_scaling.low_freq_factor": None,
    "model.rope_scaling.high_freq_factor": None,
    "model.rope_scaling.attention_factor": None,
    "model.rope_scaling.beta_fast": None,
    "model.rope_scaling.beta_slow": None,
    "model.rope_scaling.mscale": None,
    "model.rope_scaling.mscale_all_dim": None,
    "model.rope_scaling.truncate": None,
    "model.tie_word_embeddings": False,
    "model.attention_bias": False,
    "model.attention_output_bias": None,
    "model.qk_norm": False,
    "model.initializer_range": 0.02,
    "model.base_window": None,
    "model.base_sinks": 0,
    "model.query_affine": None,
    "model.attention_kernel": "auto",
    "tokenizer.type": "byte",
    "tokenizer.path": None,
    "data.train": [],
    "data.validation": None,
    "data.sft.train": [],
    "data.sft.validation": None,
    "data.sft.chat_template": None,
    "data.sft.template_variables": {},
    "data.sft.train_on": "all",
    "data.sft.too_long": "drop",
    "data.sft.packing": True,
    "data.split": (0.98, 0.01, 0.01),
    "data.document_mask": True,
    "data.output_positions_multiple": 128,
    "data.cache_dir": None,
    "data.prefetch_steps": 2,
    "train.steps": REQUIRED,
    "train.micro_batch_size": REQUIRED,
    "train.global_batch_size": REQUIRED,
    "train.sequence_length": REQUIRED,
    "train.seed": 42,
    "train.activation_checkpointing": False,
    "train.compile": False,
    "train.deterministic": False,
    "train.max_consecutive_skips": 10,
    "train.wall_clock_limit_seconds": None,
    "optimizer.learning_rate": 3e-4,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.95,
    "optimizer.eps": 1e-8,
    "optimizer.weight_decay": 0.1,
    "optimizer.decay_embeddings": False,
    "optimizer.affine_lr_scale": 1.0,
    "optimizer.clip_grad_norm": 1.0,
    "schedule.type": "cosine",
    "schedule.warmup_steps": 0,
    "schedule.decay_steps": None,
    "schedule.min_lr_ratio": 0.1,
    "parallel.tensor": 1,
    "parallel.sequence": False,
    "parallel.pipeline": 1,
    "parallel.zero_stage": 1,
    "parallel.overlap_gradients": None,
    "parallel.timeout_seconds": 1800.0,
    "parallel.watchdog_seconds": None,
    "checkpoint.interval_steps": None,
    "checkpoint.keep_last": 2,
    "checkpoint.resume": True,
    "logging.interval_steps": 10,
    "logging.tensorboard": True,
    "logging.peak_tflops": None,
    "evaluation.interval_steps": None,
    "evaluation.samples": 64,
    "evaluation.suites.names": [],
    "evaluation.suites.interval_steps": None,
    "evaluation.suites.limit": None,
    "evaluation.suites.data_source": "hub",
    "evaluation.suites.data_dir": None,
    "evaluation.suites.cache_dir": ".cache",
    "evaluation.suites.skip_unavailable": False,
    "evaluation.suites.texts": [],
    "evaluation.suites.lengths": [1024, 2048, 4096],
    "adaptation.freeze": "none",
    "adaptation.start_window": None,
    "adaptation.window_steps": None,
    "adaptation.distillation.weight": 0.0,
    "adaptation.distillation.temperature": 1.0,
    "adaptation.distillation.teacher": None,
}


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


def options_of(schema: Any, prefix: str = "") -> dict[str, object]:
    """Every option with its default, walked independently of the loader."""
    found: dict[str, object] = {}
    for name, field in schema.model_fields.items():
        path = prefix + name
        nested = [
            t for t in (field.annotation, *getattr(field.annotation, "__args__", ())) if hasattr(t, "model_fields")
        ]
        optional = field.default is None
        if not nested or optional:
            found[path] = REQUIRED if field.is_required() else field.default
        if nested:
            found.update(options_of(nested[0], f"{path}.")) if "list" not in str(field.annotation) else None
            if "list" in str(field.annotation):
                found[path] = field.default
    return found


def test_options_and_defaults_are_frozen() -> None:
    assert options_of(Config) == OPTIONS


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert "Value error" not in message
    return message


BAD_OVERRIDES = [
    # unknown names
    ("train.step=3", "unknown option train.step; did you mean train.steps?"),
    ("model.hiden_size=64", "did you mean model.hidden_size?"),
    ("modle.hidden_size=64", "unknown option modle; did you mean model?"),
    ("learning_rate=1", "unknown option learning_rate; did you mean optimizer.learning_rate?"),
    ("train.warmup_steps=1", "did you mean schedule.warmup_steps?"),
    ("model.BASE_WINDOW=1", "did you mean model.base_window?"),
    ("optimizer.warmup=1", "did you mean schedule.warmup_steps?"),
    ("checkpoint.zzz=1", "checkpoint has interval_steps, keep_last, resume"),
    ("zzz=1", "the top level has task, output_dir"),
    ("data.train=[{prefx: a}]", "unknown option data.train[0].prefx; did you mean data.train[0].prefix?"),
    ("model.rope_scaling={rope_type: linear, facter: 2}", "did you mean model.rope_scaling.factor?"),
    ("model.rope_scaling={rope_type: linear, factor: 2, rope_theta: 3}", "did you mean model.rope_theta?"),
    # types
    ("train.steps=ten", "train.steps must be a whole number, but is the text 'ten'"),
    ("train.steps='10'", "remove the quotes"),
    ("train.steps=true", "train.steps must be a whole number, but is true"),
    ("train.steps=1e5", "train.steps must be a whole number, but is 100000.0: write 100000"),
    ("train.steps=1.5", "train.steps must be a whole number, but is 1.5"),
    ("train.steps=null", "train.steps must be a whole number, but is null"),
    ("train.steps=", "train.steps must be a whole number, but is null"),
    ("optimizer.learning_rate=fast", "optimizer.learning_rate must be a number, but is the text 'fast'"),
    ("optimizer.learning_rate='1e-3'", "remove the quotes"),
    ("optimizer.learning_rate=false", "optimizer.learning_rate must be a number, but is false"),
    ("optimizer.learning_rate=.inf", "must be a finite number"),
    ("optimizer.learning_rate=.nan", "must be a finite number"),
    ("data.document_mask=1", "data.document_mask must be true or false, but is 1"),
    ("output_dir=3", "output_dir must be text, but is 3: put it in quotes"),
    ("model=[1]", "model must be a mapping of options, but is a list"),
    ("model=3", "model must be a mapping of options, but is 3"),
    ("data.train={prefix: a}", "data.train must be a list, but is a mapping"),
    ("data.train=[a]", "data.train[0] must be a mapping of options, but is the text 'a'"),
    ("data.train=[{weight: 1}]", "data.train[0].prefix is required but missing"),
    ("data.split=[0.5, 0.5]", "data.split[2] is required but missing"),
    ("data.split=[0.1, 0.2, 0.3, 0.4]", "data.split"),
    ("data.split=0.5", "data.split must be a list, but is 0.5"),
    ("model.1=2", "unknown option model.1"),
    # ranges and choices
    ("model.base_window=0", "model.base_window must be at least 1, but is 0 (the window counts the token itself"),
    ("model.base_window=-4", "model.base_window must be at least 1, but is -4"),
    ("model.base_sinks=-1", "model.base_sinks must be at least 0, but is -1"),
    ("optimizer.learning_rate=0", "optimizer.learning_rate must be greater than 0, but is 0"),
    ("optimizer.beta2=1", "optimizer.beta2 must be less than 1, but is 1"),
    ("schedule.min_lr_ratio=2", "schedule.min_lr_ratio must be at most 1, but is 2"),
    ("precision=bfloat16", "precision must be one of fp32, bf16, but is the text 'bfloat16'; did you mean bf16?"),
    ("precision=fp16", "precision: fp16 is refused: its range ends at 65504"),
    ("precision=float16", "set precision: bf16 (or fp32)"),
    ("schedule.type=cosin", "did you mean cosine?"),
    ("train.steps=99999999999999999999999", "train.steps must be at most 9007199254740992, but is"),
    ("train.seed=-99999999999999999999999", "train.seed must be at least -9007199254740992, but is"),
    ("model.num_hidden_layers=1000000", "model.num_hidden_layers must be at most 10000, but is 1000000"),
    ("train.global_batch_size=200000000000", "train.global_batch_size must be at most 16777216, but is 200000000000"),
    ("parallel.zero_stage=0", "parallel.zero_stage must be one of 1, 2, 3, but is 0"),
    ("parallel.zero_stage=true", "parallel.zero_stage must be 1, 2 or 3, but is true"),
    ("parallel.zero_stage=2.0", "parallel.zero_stage must be 1, 2 or 3, but is 2.0"),
    # several options
    ("model.num_key_value_heads=3", "set model.num_key_value_heads to a divisor of 4"),
    ("model.num_attention_heads=3", "model.hidden_size (64) is not a multiple of model.num_attention_heads (3)"),
    ("model.head_dim=7", "model.head_dim is 7, but RoPE rotates pairs of channels: set model.head_dim to an even"),
    ("model.hidden_size=60", "model.head_dim (model.hidden_size / model.num_attention_heads) is 15, but RoPE"),
    ("train.sequence_length=4096", "raise model.max_position_embeddings to 4096 or set model.rope_scaling"),
    ("train.micro_batch_size=3", "train.global_batch_size (8) is not a multiple of train.micro_batch_size (3)"),
    ("schedule.warmup_steps=101", "schedule.warmup_steps (101) is more than train.steps (100)"),
    ("schedule={type: wsd, warmup_steps: 60, decay_steps: 50}", "together are more than train.steps (100)"),
    ("schedule={type: constant, decay_steps: 5}", "schedule.decay_steps has no meaning with schedule.type: constant"),
    ("data.split=[0.9, 0.2, 0.1]", "data.split is [0.9, 0.2, 0.1]: give the train, validation and test shares"),
    ("data.split=[0, 0.5, 0.5]", "train above 0"),
    ("data.split=[1.5, -0.5, 0]", "none negative"),
    ("tokenizer.type=sentencepiece", "tokenizer.type: sentencepiece needs tokenizer.path: set it to the .model file"),
    ("tokenizer.type=huggingface", "set it to the folder that holds tokenizer.json"),
    ("tokenizer.path=a.model", "tokenizer.path has no meaning with tokenizer.type: byte"),
    # conversations
    ("data.sft.train=[{path: a.jsonl}]", "data.sft names conversations, which task: pretrain does not read: set task"),
    ("data.sft.validation=[{path: a.jsonl}]", "set task: sft"),
    ("data.sft.train=[{weight: 2}]", "a data.sft source needs either path (files) or dataset (a name)"),
    ("data.sft.train=[{path: a, dataset: b}]", "set one of them"),
    ("data.sft.train=[{path: a, split: test}]", "configuration and split of a data.sft source belong to dataset"),
    ("data.sft.train=[{path: a, columns: {question: q}}]", "names 'question'; it maps any of messages, prompt, resp"),
    ("data.sft.train=[{path: a, weight: 0}]", "data.sft.train[0].weight must be greater than 0"),
    ("data.sft.train_on=first", "data.sft.train_on must be one of all, last"),
    ("data.sft.too_long=truncate", "data.sft.too_long must be one of drop, cut_start, cut_end"),
    ("data.sft.pack=false", "did you mean data.sft.packing?"),
    # adaptation
    ("adaptation.freeze=all", "adaptation.freeze must be one of none, all_but_affines"),
    ("adaptation.start_window=64", "adaptation.start_window needs adaptation.window_steps: set both or neither"),
    ("adaptation.window_steps=64", "adaptation.window_steps needs adaptation.start_window: set both or neither"),
    ("adaptation={start_window: 8, window_steps: 5}", "must be more than model.base_window (8), to which it shrinks"),
    ("adaptation.distillation.weight=1.5", "adaptation.distillation.weight must be at most 1"),
    ("adaptation.distillation.weight=0.5", "adaptation.distillation.weight needs a teacher: set init_from"),
    ("adaptation.distillation.teacher=a", "has no effect with adaptation.distillation.weight: 0"),
    # suites
    ("evaluation.suites=[commonsense]", "evaluation.suites must be a mapping of options, but is a list"),
    ("evaluation.suites.name=[a]", "did you mean evaluation.suites.names?"),
    ("evaluation.suites.limit=3", "evaluation.suites.limit has no effect without evaluation.suites.names: name suites"),
    ("evaluation.suites={names: [long], limit: 0}", "evaluation.suites.limit must be at least 1, but is 0"),
    (
        "evaluation.suites={names: [long], data_source: hubb}",
        "must be one of hub, package, but is the text 'hubb'; did",
    ),
    ("evaluation.suites={names: [long], texts: [a.txt]}", "belongs to the suite perplexity, which evaluation.suites"),
    ("evaluation.suites={names: [recall], lengths: [512]}", "add long, or remove evaluation.suites.lengths"),
    ("evaluation.suites={names: [long], lengths: [0]}", "evaluation.suites.lengths[0] must be at least 1, but is 0"),
    (
        "evaluation.suites={names: [long], lengths: []}",
        "evaluation.suites.lengths is a list: List should have at least",
    ),
    ("evaluation.suites={names: [a], data_source: package, data_dir: b}", "are two sources of the data: remove one"),
    # RoPE scaling
    ("model.rope_scaling={factor: 2}", "model.rope_scaling.rope_type is required but missing"),
    ("model.rope_scaling={rope_type: longrope}", "must be one of default, linear, dynamic, yarn, llama3"),
    ("model.rope_scaling={rope_type: linear}", "model.rope_scaling.factor is required by rope_type: linear"),
    ("model.rope_scaling={rope_type: yarn, factor: 2}", "original_max_position_embeddings is required by rope_type"),
    ("model.rope_scaling={rope_type: linear, factor: 0.5}", "model.rope_scaling.factor must be at least 1"),
    ("model.rope_scaling={rope_type: linear, factor: true}", "model.rope_scaling.factor must be a number"),
    ("model.rope_scaling={rope_type: linear, factor: 2, beta_fast: 3}", "beta_fast has no meaning with rope_type"),
    (
        "model.rope_scaling={rope_type: llama3, factor: 8, low_freq_factor: 4, high_freq_factor: 4,"
        " original_max_position_embeddings: 8192}",
        "model.rope_scaling.low_freq_factor (4.0) must be less than",
    ),
    # the override itself
    ("train.steps", "override 'train.steps' has no '=': write key=value"),
    ("=3", "'' is not an option name"),
    ("train..steps=3", "'train..steps' is not an option name"),
    ("data.train=[a", "is not valid YAML after '='"),
    ("data.train[0].prefix=a", "data.train must be a list, but is a mapping: write all of it in brackets"),
    ("output_dir=${nothing}", "nothing"),
    ("output_dir=${", "override 'output_dir=${'"),
]


@pytest.mark.parametrize(("override", "fragment"), BAD_OVERRIDES)
def test_bad_override_is_refused_in_one_line(config_file: Path, override: str, fragment: str) -> None:
    assert fragment in refused(config_file, override)


@pytest.mark.parametrize(
    ("overrides", "fragment"),
    [
        (
            ["model.architecture=transformer", "model.query_affine=elementwise"],
            "set model.query_affine: none or remove it",
        ),
        (["model.base_window=null", "model.base_sinks=1"], "set model.base_window, or model.base_sinks: 0"),
        (["data.train=[{prefix: a}]", "data.train[3].prefix=a"], "list index out of range"),
        (["data.train=[{prefix: a}]", "data.train.first.prefix=a"], "override 'data.train.first.prefix=a'"),
        (["train.steps=x", "optimizer.eps=-1"], "(and 1 more problem)"),
        (["train.steps=x", "optimizer.eps=-1", "nonsense=1"], "(and 2 more problems)"),
    ],
)
def test_bad_combinations_are_refused(config_file: Path, overrides: list[str], fragment: str) -> None:
    assert fragment in refused(config_file, *overrides)


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (b"", "is empty"),
        (b"# nothing\n", "is empty"),
        (b"- a\n- b\n", "holds a list where a mapping of options is expected"),
        (b"42\n", "as a mapping of options"),
        (b"just some words\n", "unknown option just some words"),
        (b"model: [\n", "is not valid YAML: line 2, column 1"),
        (b"a: b: c\n", "is not valid YAML: line 1, column 5"),
        (b"task: pretrain\ntask: sft\n", "found duplicate key task"),
        (b"\x7fELF\xff\xfe\x00\x01", "is not a text file"),
        (b"a: \x00\n", "is not valid YAML"),
        (MINIMAL.replace("outputs/x", "???").encode(), "output_dir"),
        (MINIMAL.replace("steps: 100, ", "").encode(), "train.steps is required but missing"),
        (MINIMAL.encode() + b"1: 2\n", "unknown option 1"),
        (MINIMAL.encode() + b"data: []\n", "data must be a mapping of options, but is a list"),
        (MINIMAL.encode() + b"init_from: !!python/object:os.system x\n", "is not valid YAML"),
    ],
)
def test_bad_file_is_refused_in_one_line(tmp_path: Path, content: bytes, fragment: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    message = refused(path)
    assert fragment in message
    assert str(path) in message


def test_missing_file_and_folder(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "none.yaml")
    assert "is a folder" in refused(tmp_path)


def test_message_says_where_the_value_was_written(config_file: Path) -> None:
    assert refused(config_file, "train.steps=x").startswith("override 'train.steps=x': ")
    assert refused(config_file, "data.train=[{prefix: a}]", "data.train.0.weight=-1").startswith(
        "override 'data.train.0.weight=-1': "
    )
    assert refused(config_file, "data.train=[{prefx: a}]").startswith("override 'data.train=[{prefx: a}]': ")
    assert refused(config_file, "precision=fp16").startswith("override 'precision=fp16': precision: fp16 is refused")
    assert refused(config_file, "data.train[0].prefix=a").startswith("override 'data.train[0].prefix=a': ")
    assert refused(config_file, "model.hidden_size=60", "train.seed=1").startswith(f"{config_file} with overrides: ")
    config_file.write_text(MINIMAL + "checkpoint: {keep_last: 0}\n")
    assert refused(config_file, "train.steps=3").startswith(f"{config_file}: checkpoint.keep_last must be at least 1")


def test_unknown_option_is_reported_before_the_missing_one_it_explains(config_file: Path) -> None:
    config_file.write_text(MINIMAL.replace("hidden_size", "hiden_size"))
    assert "unknown option model.hiden_size; did you mean model.hidden_size?" in refused(config_file)


def test_overrides_apply_in_order_and_replace_whole_values(config_file: Path) -> None:
    config = load_config(
        config_file,
        [
            "train.steps=5",
            "train.steps=7",
            "data.train=[{prefix: a}, {prefix: b, weight: 3}]",
            "data.train[1].weight=2",
            "data.train.0.prefix=c=d",
            "model.rope_scaling={rope_type: linear, factor: 2}",
            "model.rope_scaling={rope_type: dynamic, factor: 4}",
            "model.base_window=null",
        ],
    )
    assert config.train.steps == 7
    assert [(source.prefix, source.weight) for source in config.data.train] == [("c=d", 1.0), ("b", 2.0)]
    assert config.model.rope_scaling is not None
    assert config.model.rope_scaling.keys_given() == {"rope_type": "dynamic", "factor": 4.0}
    assert config.model.base_window is None


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 1e-3), ("1E-3", 1e-3), ("1", 1.0), ("2.5e+1", 25.0), (".5", 0.5), ("1.", 1.0)]
)
def test_floats_are_read_as_users_write_them(config_file: Path, text: str, value: float) -> None:
    from_override = load_config(config_file, [f"optimizer.learning_rate={text}"]).optimizer.learning_rate
    config_file.write_text(MINIMAL + f"optimizer: {{learning_rate: {text}}}\n")
    from_file = load_config(config_file).optimizer.learning_rate
    assert from_override == from_file == value
    assert isinstance(from_file, float)


def test_interpolation(config_file: Path) -> None:
    config = load_config(config_file, ["model.max_position_embeddings=${train.sequence_length}"])
    assert config.model.max_position_embeddings == 32


def test_old_name_of_the_rope_type(config_file: Path) -> None:
    config = load_config(config_file, ["model.rope_scaling={type: linear, factor: 2}", "train.sequence_length=4096"])
    assert config.model.rope_scaling is not None
    assert config.model.rope_scaling.rope_type == "linear"


def test_rope_type_default_is_no_scaling(config_file: Path) -> None:
    message = refused(config_file, "model.rope_scaling={rope_type: default}", "train.sequence_length=4096")
    assert "model.max_position_embeddings" in message


TEACHER = "adaptation.distillation={weight: 0.5, teacher: a}"


@pytest.mark.parametrize(
    ("overrides", "fragment"),
    [
        (
            ("parallel.pipeline=2", TEACHER),
            "the last stage alone has logits, and a teacher would need all layers on it",
        ),
        (("parallel.tensor=2", TEACHER), "each rank has the logits of a part of the vocabulary, and KL needs them all"),
        (
            ("model.base_window=null", "adaptation={start_window: 8, window_steps: 5}"),
            "model.base_window, which is null",
        ),
        (("model.query_affine=none", "adaptation.freeze=all_but_affines"), "leaves nothing to train"),
        (("model.architecture=transformer", "adaptation.freeze=all_but_affines"), "leaves nothing to train"),
    ],
)
def test_adaptations_that_the_model_or_layout_cannot_have(
    config_file: Path, overrides: tuple[str, ...], fragment: str
) -> None:
    assert fragment in refused(config_file, *overrides)


def test_sft_is_a_valid_task(config_file: Path) -> None:
    assert load_config(config_file, ["task=sft"]).task == "sft"


def test_assignment_is_checked(config_file: Path) -> None:
    config = load_config(config_file)
    with pytest.raises(ValueError, match="valid integer"):
        config.train.steps = "many"  # type: ignore[assignment]


def test_configs_do_not_share_sections(config_file: Path) -> None:
    first, second = load_config(config_file), load_config(config_file)
    first.optimizer.learning_rate = 1.0
    first.data.train.append("x")  # type: ignore[arg-type]
    assert second.optimizer.learning_rate == 3e-4
    assert second.data.train == []


def test_yaml_round_trip_of_every_option(config_file: Path) -> None:
    config = load_config(
        config_file,
        ["data.train=[{prefix: a}]", "data.split=[0.9, 0.1, 0]", "model.rope_scaling={rope_type: linear, factor: 2}"],
    )
    text = config_to_yaml(config)
    config_file.write_text(text)
    assert load_config(config_file) == config
    for option, default in OPTIONS.items():
        section, _, name = option.rpartition(".")
        if not section.startswith("model.rope_scaling") or name in ("rope_type", "factor"):
            assert re.search(rf"^\s*{name}:", text, re.MULTILINE), (option, default)


@settings(deadline=None)
@given(
    output_dir=st.text(
        st.characters(codec="utf-8", exclude_characters="$", exclude_categories=("Cc", "Cs")), min_size=1
    ),
    learning_rate=st.floats(min_value=1e-30, max_value=1e30),
    seed=st.integers(-(2**53), 2**53),
    split=st.floats(0.01, 0.99).map(lambda share: (share, 1 - share, 0.0)),
)
def test_yaml_round_trip_of_any_value(
    tmp_path_factory: pytest.TempPathFactory,
    output_dir: str,
    learning_rate: float,
    seed: int,
    split: tuple[float, float, float],
) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    path.write_text(MINIMAL)
    config = load_config(path)
    config.output_dir, config.train.seed, config.data.split = output_dir, seed, split
    config.optimizer.learning_rate = learning_rate
    path.write_text(config_to_yaml(config), encoding="utf-8")
    assert load_config(path) == config


FOUR_STAGES = ("parallel.pipeline=4", "model.num_hidden_layers=4")
SHARDED = ("parallel.tensor=4", "parallel.sequence=true")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["parallel.tensor=8", "model.intermediate_size=96"],
            "model.num_attention_heads=4 does not divide by parallel.tensor=8; set parallel.tensor to a common divisor "
            "of heads, KV heads and model.intermediate_size (1, 2, 4), or change model.num_attention_heads",
        ),
        (
            ["parallel.tensor=4", "model.num_key_value_heads=2"],
            "model.num_key_value_heads=2 does not divide by parallel.tensor=4; set parallel.tensor to a common divisor "
            "of heads, KV heads and model.intermediate_size (1, 2), or change model.num_key_value_heads",
        ),
        (
            ["parallel.tensor=4", "model.intermediate_size=130"],
            "model.intermediate_size=130 does not divide by parallel.tensor=4; set parallel.tensor to a common divisor "
            "of heads, KV heads and model.intermediate_size (1, 2), or change model.intermediate_size",
        ),
        (
            ["parallel.pipeline=3"],
            "parallel.pipeline=3 is more stages than model.num_hidden_layers=2 can fill; "
            "set parallel.pipeline to 2 or less",
        ),
        (
            [*FOUR_STAGES, "parallel.zero_stage=2"],
            "parallel.zero_stage=2 does not combine with parallel.pipeline=4: DeepSpeed's pipeline keeps whole "
            "gradients until the step; set parallel.zero_stage: 1, or parallel.pipeline: 1 (parallel.tensor saves "
            "memory under every ZeRO stage)",
        ),
        (
            ["parallel.overlap_gradients=true"],
            "parallel.overlap_gradients does not combine with parallel.zero_stage=1, which sums gradients once a step, "
            "after the last backward pass: set parallel.overlap_gradients: false, or parallel.zero_stage: 2",
        ),
        (
            ["train.compile=true", "parallel.zero_stage=3"],
            "train.compile does not go with parallel.zero_stage=3, whose calls torch.compile does not look into: set "
            "parallel.zero_stage: 2, or train.compile: false",
        ),
        (
            ["train.compile=true", "train.activation_checkpointing=true"],
            "set train.activation_checkpointing: false, or train.compile: false",
        ),
        (["train.compile=true", "parallel.tensor=2"], "train.compile does not go with parallel.tensor, "),
        ([*FOUR_STAGES, "train.compile=true"], "train.compile does not go with parallel.pipeline, "),
        ([*FOUR_STAGES, "parallel.zero_stage=3"], "set parallel.zero_stage: 1, or parallel.pipeline: 1"),
        (
            ["parallel.sequence=true"],
            "parallel.sequence shares tokens among the ranks of parallel.tensor, which is 1: set parallel.tensor to 2 "
            "or more, or parallel.sequence: false",
        ),
        (
            [*SHARDED, "train.sequence_length=30"],
            "train.sequence_length=30 does not divide by parallel.tensor=4, as parallel.sequence needs; set "
            "train.sequence_length to a multiple of 4 (the next is 32), or parallel.sequence: false",
        ),
        (
            [*SHARDED, "task=sft", "data.output_positions_multiple=6"],
            "data.output_positions_multiple=6 does not divide by parallel.tensor=4, as parallel.sequence needs; set "
            "data.output_positions_multiple to a multiple of 4 (the next is 8), or parallel.sequence: false",
        ),
    ],
)
def test_impossible_layouts_are_refused_with_the_remedy(config_file: Path, overrides: list[str], message: str) -> None:
    shown = refused(config_file, *overrides)
    assert message in shown
    assert shown.startswith(f"{config_file} with overrides: ")


@pytest.mark.parametrize(
    ("layout", "remedy"),
    [
        ("parallel.pipeline=2", "parallel.pipeline: 2 divides: set parallel.pipeline: 1, or remove evaluation.suites"),
        ("parallel.tensor=2", "parallel.tensor: 2 divides: set parallel.tensor: 1, or remove evaluation.suites"),
        ("parallel.zero_stage=3", "parallel.zero_stage: 3 divides: set parallel.zero_stage: 1 or 2, or remove"),
    ],
)
def test_suites_need_the_whole_model_on_every_rank(config_file: Path, layout: str, remedy: str) -> None:
    message = refused(config_file, layout, "evaluation.suites.names=[commonsense]")
    assert remedy in message
    assert "`python -m evaluation.run --model OUTPUT_DIR" in message
    load_config(config_file, [layout])
    load_config(config_file, ["parallel.zero_stage=2", "evaluation.suites.names=[commonsense]"])


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.tensor=4"],
        ["parallel.tensor=2", "model.num_key_value_heads=2"],
        ["parallel.pipeline=2"],
        ["parallel.pipeline=2", "parallel.tensor=2", "parallel.sequence=true"],
        ["parallel.tensor=4", "parallel.zero_stage=3"],
        [*SHARDED],
        [*SHARDED, "data.output_positions_multiple=6"],  # counts in SFT alone
        ["parallel.tensor=4", "train.sequence_length=30"],  # counts under sequence parallelism alone
        ["parallel.tensor=2", "model.vocab_size=259"],  # padded inside
    ],
)
def test_possible_layouts_are_accepted(config_file: Path, overrides: list[str]) -> None:
    load_config(config_file, overrides)


def test_a_layout_s_rule_is_bad_input_wherever_it_is_applied() -> None:
    with pytest.raises(InputError, match=r"model\.num_key_value_heads=3 does not divide by parallel\.tensor=2"):
        check_tensor_size(2, heads=6, kv_heads=3, intermediate_size=64)
    with pytest.raises(InputError, match=r"parallel\.pipeline=5 is more stages"):
        check_pipeline_size(5, layers=4)


@settings(deadline=None)
@given(tensor=st.integers(1, 8), pipeline=st.integers(1, 8), data=st.integers(1, 8), rest=st.integers(0, 63))
def test_a_world_factors_or_is_refused(tensor: int, pipeline: int, data: int, rest: int) -> None:
    replica = tensor * pipeline
    world_size = replica * data + rest % replica
    if rest % replica == 0:
        assert data_parallel_size(world_size, tensor, pipeline) == data
    else:
        with pytest.raises(InputError, match=f"start a multiple of {replica} ranks or lower one of them"):
            data_parallel_size(world_size, tensor, pipeline)


def test_ranks_of_one_replica_share_its_micro_batches(config_file: Path) -> None:
    layout = ["parallel.tensor=2", "parallel.pipeline=2"]
    config = load_config(config_file, [*layout, "train.global_batch_size=24"])
    assert [gradient_accumulation_steps(config, world_size) for world_size in (4, 8, 12)] == [12, 6, 4]
    with pytest.raises(
        InputError, match=r"1 rank does not factor into parallel\.tensor=2 x parallel\.pipeline=2; start"
    ):
        gradient_accumulation_steps(config, 1)
    with pytest.raises(InputError, match=r"\(2\) times 5 replicas \(20 ranks / 4\) = 10: change one of the three"):
        gradient_accumulation_steps(config, 20)


def test_the_watchdog_speaks_before_the_timeout_unless_told_otherwise(config_file: Path) -> None:
    parallel = load_config(config_file, ["parallel.timeout_seconds=100"]).parallel
    assert parallel.resolved_watchdog_seconds == 50
    assert load_config(config_file, ["parallel.watchdog_seconds=7.5"]).parallel.resolved_watchdog_seconds == 7.5
    assert "parallel.watchdog_seconds must be greater than 0" in refused(config_file, "parallel.watchdog_seconds=0")


@settings(deadline=None)
@given(
    micro=st.integers(1, 64), world_size=st.integers(1, 64), accumulation=st.integers(1, 64), rest=st.integers(0, 63)
)
def test_gradient_accumulation_steps(micro: int, world_size: int, accumulation: int, rest: int) -> None:
    together = micro * world_size
    rest = rest % world_size * micro  # what one rank's micro-batches alone would allow
    config = minimal_config(micro_batch_size=micro, global_batch_size=together * accumulation + rest)
    if rest == 0:
        assert gradient_accumulation_steps(config, world_size) == accumulation
    else:
        with pytest.raises(InputError, match=f"{world_size} ranks = {together}: change one of the three"):
            gradient_accumulation_steps(config, world_size)


def minimal_config(**options: Any) -> Config:
    """A small Config; options of the sections model and train by name."""
    model = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    train = {"steps": 1, "micro_batch_size": 1, "global_batch_size": 1, "sequence_length": 32}
    for name, value in options.items():
        (train if name in train else model)[name] = value
    return Config.model_validate({"output_dir": "x", "model": model, "train": train})


def test_orthros_config_takes_every_model_option() -> None:
    section = {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "attention_output_bias": False,
        "qk_norm": True,
        "initializer_range": 0.01,
        "base_window": 16,
        "base_sinks": 1,
        "query_affine": "none",
        "attention_kernel": "eager",
    }
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    }
    built = orthros_config(minimal_config(**section, rope_scaling=scaling, architecture="orthros"), vocab_size=259)
    assert built.vocab_size == 259
    assert built.architecture == "orthros"
    for name, value in section.items():
        if name != "rope_theta":
            assert getattr(built, name) == value, name
    assert built.rope_parameters == {**scaling, "rope_theta": 500000.0}


def test_orthros_config_fills_the_defaults() -> None:
    built = orthros_config(minimal_config(architecture="transformer"), vocab_size=300)
    assert (built.num_key_value_heads, built.head_dim, built.query_affine) == (4, 16, "none")
    assert (built.attention_output_bias, built.base_window) == (False, None)
    assert built.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert orthros_config(minimal_config(), vocab_size=300).query_affine == "elementwise"


def test_model_vocabulary_may_be_larger_than_the_tokenizer_but_not_smaller() -> None:
    assert orthros_config(minimal_config(vocab_size=512), vocab_size=259).vocab_size == 512
    with pytest.raises(InputError, match=r"model\.vocab_size \(200\) is less than the tokenizer's 259 ids"):
        orthros_config(minimal_config(vocab_size=200), vocab_size=259)
