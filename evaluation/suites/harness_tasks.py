"""Tasks whose prompt and metric are lm-eval's own; only the data comes through our sources."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.suites import data_sets
from evaluation.suites.data_sets import DataSet
from evaluation.suites.task_card import DEFAULT_NEW_TOKENS, TaskCard, TaskSetting, make_task

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

STRUCTURE = ("tag", "group", "task_list", "include", "dataset_kwargs")  # of lm-eval's files, no part of a task

MMLU_SUBJECTS = [
    "abstract_algebra",
    "anatomy",
    "astronomy",
    "business_ethics",
    "clinical_knowledge",
    "college_biology",
    "college_chemistry",
    "college_computer_science",
    "college_mathematics",
    "college_medicine",
    "college_physics",
    "computer_security",
    "conceptual_physics",
    "econometrics",
    "electrical_engineering",
    "elementary_mathematics",
    "formal_logic",
    "global_facts",
    "high_school_biology",
    "high_school_chemistry",
    "high_school_computer_science",
    "high_school_european_history",
    "high_school_geography",
    "high_school_government_and_politics",
    "high_school_macroeconomics",
    "high_school_mathematics",
    "high_school_microeconomics",
    "high_school_physics",
    "high_school_psychology",
    "high_school_statistics",
    "high_school_us_history",
    "high_school_world_history",
    "human_aging",
    "human_sexuality",
    "international_law",
    "jurisprudence",
    "logical_fallacies",
    "machine_learning",
    "management",
    "marketing",
    "medical_genetics",
    "miscellaneous",
    "moral_disputes",
    "moral_scenarios",
    "nutrition",
    "philosophy",
    "prehistory",
    "professional_accounting",
    "professional_law",
    "professional_medicine",
    "professional_psychology",
    "public_relations",
    "security_studies",
    "sociology",
    "us_foreign_policy",
    "virology",
    "world_religions",
]


def harness_card(
    name: str,
    file: str,
    data: DataSet,
    prompt: str,
    metric: str,
    version: str,
    *,
    shots: int = 0,
    shot_split: str | None = None,
    adapt: Callable[[Any], Any] | None = None,
    weight_group: str | None = None,
    tokens: int | None = None,
) -> TaskCard:
    """A card for a task of lm-eval's: `file` is its YAML file below lm_eval/tasks.

    Examples come from `shot_split`. `adapt` makes the rows of a package look like the hub's and leaves the hub's alone.
    The rest: see TaskCard.
    """

    def build(setting: TaskSetting) -> ConfigurableTask:
        config = _yaml(file)
        scored = scored_split(setting)
        rows = {scored: setting.rows(data, scored)}
        if shot_split and shots:
            rows[shot_split] = setting.source.split(data, shot_split)
        if adapt is not None:
            rows = {split: adapt(table) for split, table in rows.items()}
        config |= {
            "task": name,
            "training_split": shot_split if shot_split == "train" and shots else None,
            "validation_split": None,
            "test_split": scored,
            "fewshot_split": shot_split if shots else None,
            "num_fewshot": shots,
        }
        return make_task(config, rows)

    def scored_split(setting: TaskSetting) -> str:
        splits = setting.source.available(data)
        return data.splits[-1] if data.splits[-1] in splits else splits[-1]

    def describe(setting: TaskSetting) -> dict[str, Any]:
        return {**setting.source.describe(data), "split": scored_split(setting)}

    def reads(setting: TaskSetting) -> list[tuple[DataSet, str]]:
        splits = [scored_split(setting), *([shot_split] if shot_split and shots else [])]
        return [(data, split) for split in splits]

    def count(setting: TaskSetting) -> int:
        return len(setting.source.split(data, scored_split(setting)))

    about = {"name": data.name, "hub": data.hub, "config": data.config, "license": data.license}
    return TaskCard(
        name,
        about,
        prompt,
        metric,
        shots,
        version,
        build,
        describe,
        weight_group=weight_group,
        count=count,
        reads=reads,
        tokens=tokens,
    )


def _yaml(file: str) -> dict[str, Any]:
    import lm_eval.tasks  # noqa: PLC0415
    from lm_eval.tasks._yaml_loader import load_yaml  # noqa: PLC0415

    config: dict[str, Any] = dict(load_yaml(Path(lm_eval.tasks.__file__).parent / file, resolve_func=True))
    return {key: value for key, value in config.items() if key not in STRUCTURE}


def _boolq_rows(rows: Any) -> Any:
    """`label` out of the original release's `answer`."""
    if "label" in rows.column_names:
        return rows
    return rows.map(lambda row: {"label": int(row["answer"])}, keep_in_memory=True)


LAMBADA = harness_card(
    "lambada_openai",
    "lambada/lambada_openai.yaml",
    data_sets.LAMBADA,
    "the passage without its last word, which is scored",
    "acc,none",
    "1.0",
)
PIQA = harness_card(
    "piqa", "piqa/piqa.yaml", data_sets.PIQA, "Question: GOAL / Answer: SOLUTION", "acc,none", "1.0"
)  # fmt: skip
HELLASWAG = harness_card(
    "hellaswag",
    "hellaswag/hellaswag.yaml",
    data_sets.HELLASWAG,
    "ACTIVITY: CONTEXT ENDING",
    "acc_norm,none",
    "1.0",
)
WINOGRANDE = harness_card(
    "winogrande",
    "winogrande/default.yaml",
    data_sets.WINOGRANDE,
    "the sentence up to each option; the rest of the sentence is scored",
    "acc,none",
    "1.0",
)
ARC_EASY = harness_card(
    "arc_easy", "arc/arc_easy.yaml", data_sets.ARC_EASY, "Question: … / Answer: CHOICE", "acc,none", "1.0"
)  # fmt: skip
ARC_CHALLENGE = harness_card(
    "arc_challenge",
    "arc/arc_challenge.yaml",
    data_sets.ARC_CHALLENGE,
    "Question: … / Answer: CHOICE",
    "acc_norm,none",
    "1.0",
)
SIQA = harness_card(
    "social_iqa", "siqa/siqa.yaml", data_sets.SIQA, "Q: CONTEXT QUESTION / A: ANSWER", "acc,none", "0.0"
)  # fmt: skip
BOOLQ = harness_card(
    "boolq",
    "super_glue/boolq/default.yaml",
    data_sets.BOOLQ,
    "PASSAGE / Question: …? / Answer: no|yes",
    "acc,none",
    "2.0",
    adapt=_boolq_rows,
)
OPENBOOKQA = harness_card(
    "openbookqa",
    "openbookqa/openbookqa.yaml",
    data_sets.OPENBOOKQA,
    "the question's stem, then the choice",
    "acc_norm,none",
    "1.0",
)
GSM8K = harness_card(
    "gsm8k",
    "gsm8k/gsm8k.yaml",
    data_sets.GSM8K,
    "5 worked examples, Question: … / Answer:, generated greedily; the number behind #### counts",
    "exact_match,strict-match",
    "3.0",
    shots=5,
    shot_split="train",
    tokens=DEFAULT_NEW_TOKENS + 1,  # the answer, and one of the prompt
)
MMLU = tuple(
    harness_card(
        f"mmlu_{subject}",
        f"mmlu/default/mmlu_{subject}.yaml",
        data_sets.mmlu(subject),
        "the subject, 5 examples, the question with its choices A to D; the letter is scored",
        "acc,none",
        "1.0",
        shots=5,
        shot_split="dev",
        weight_group="mmlu",
    )
    for subject in MMLU_SUBJECTS
)
