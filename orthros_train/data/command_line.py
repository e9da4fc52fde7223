"""Command-line arguments that the data tools share."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from orthros_train.config import TokenizerSection
from orthros_train.data.documents import DocumentFormat
from orthros_train.data.sources import Source, dataset_source, file_sources
from orthros_train.errors import InputError


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that name documents."""
    group = parser.add_argument_group("input")
    where = group.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--input",
        nargs="+",
        metavar="PATH",
        help="files (.txt, .jsonl, .json, .ndjson, .parquet; each also .gz or .zst) or folders of such files",
    )
    where.add_argument("--dataset", metavar="NAME", help="a data set of the `datasets` library: hub name or local path")
    group.add_argument("--dataset-config", metavar="NAME", help="configuration of the data set, where it has several")
    group.add_argument("--dataset-split", metavar="SPLIT", default="train", help="default: train")
    group.add_argument(
        "--text-key",
        "--jsonl-field",
        metavar="KEY",
        default="text",
        help="field of JSON lines, or column of parquet and data sets, that holds the text (default: text)",
    )
    group.add_argument(
        "--document-separator",
        metavar="SEPARATOR",
        default="file",
        help="how .txt files are cut into documents: 'file' (each file is one document, the default), 'blank-line', "
        "'line', or any other text that stands between documents, such as '<|endoftext|>'",
    )


def input_sources(arguments: argparse.Namespace) -> list[Source]:
    """The sources that the arguments of `add_input_arguments` name.

    Raises:
        InputError: as `file_sources` and `dataset_source`.
    """
    if arguments.dataset is not None:
        return [
            dataset_source(arguments.dataset, arguments.dataset_config, arguments.dataset_split, arguments.text_key)
        ]
    if not arguments.document_separator:
        raise InputError("--document-separator is empty; name 'file', 'blank-line', 'line' or a text")
    if "\n" in arguments.document_separator:
        raise InputError("--document-separator holds a line break; use 'blank-line', or a text on one line")
    return file_sources(arguments.input, DocumentFormat(arguments.text_key, arguments.document_separator))


def tokenizer_section(name: str, type_: str | None) -> TokenizerSection:
    """The tokenizer that `--tokenizer` (and `--tokenizer-type`) name.

    Without a type: `byte` is the byte tokenizer, a path that ends in .model is SentencePiece, any other is a Hugging
    Face folder.
    """
    if type_ is None:
        type_ = "byte" if name == "byte" else "sentencepiece" if Path(name).suffix == ".model" else "huggingface"
    if type_ == "byte" and name != "byte":
        raise InputError(f"--tokenizer {name} with --tokenizer-type byte: the byte tokenizer has no file; name it byte")
    return TokenizerSection.model_validate({"type": type_, "path": None if type_ == "byte" else name})


def available_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))
