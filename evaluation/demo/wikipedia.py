"""A hundred whole Wikipedia articles as plain text, out of a package: documents longer than any window here.

The package gensim (which is not installed) carries the start of a dump of the English Wikipedia as test data.
"""

from __future__ import annotations

import bz2
import json
import re
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from evaluation.files import write_output
from orthros_train.errors import InputError
from orthros_train.package_registry import download

PACKAGE = "gensim==4.4.0"
DUMP = re.compile(r"gensim/test/test_data/enwiki-latest-.*-shortened\.bz2")
LICENSE_NOTE = "articles of the English Wikipedia, CC BY-SA 3.0, in the test data of the package gensim"
LEAST_CHARACTERS = 2_000  # of an article's text: shorter pages are redirects and stubs
# What follows one of these headings is lists of titles and links.
BACK_MATTER = re.compile(
    r"^==\s*(see also|notes?|references|footnotes|citations|sources|bibliography|further reading|external links)\b.*",
    re.IGNORECASE | re.MULTILINE,
)


def wikipedia_articles(cache: Path) -> dict[str, str]:
    """Text by title, in the dump's order; made at the first call and kept in `cache`.

    Raises:
        InputError: the packages cannot be had, or do not hold what is expected.
    """
    kept = cache / "wikipedia.json"
    if not kept.is_file():
        with tempfile.TemporaryDirectory() as scratch:
            articles = dict(articles_of_dump(_read_dump(download(PACKAGE, Path(scratch)))))
        write_output(kept, json.dumps(articles, ensure_ascii=False))
    try:
        found: dict[str, str] = json.loads(kept.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{kept} is not JSON ({error}); remove it and run again") from error
    return found


def _read_dump(archive: Path) -> bytes:
    try:
        with zipfile.ZipFile(archive) as package:
            member = next(name for name in package.namelist() if DUMP.fullmatch(name))
            return bz2.decompress(package.read(member))
    except (OSError, zipfile.BadZipFile, StopIteration) as error:
        raise InputError(f"{PACKAGE} does not hold the expected articles ({error or 'no dump in it'})") from error


def articles_of_dump(dump: bytes) -> Iterator[tuple[str, str]]:
    """(title, text) of each article of a MediaWiki XML dump that is long enough."""
    for page in ElementTree.fromstring(dump).iterfind("{*}page"):
        title, text = page.findtext("{*}title"), page.findtext("{*}revision/{*}text")
        if page.findtext("{*}ns") == "0" and title and text and len(plain := plain_text(text)) >= LEAST_CHARACTERS:
            yield title, plain


def plain_text(markup: str) -> str:
    """Prose of an article: without references, tables, pictures, categories and what follows the last section."""
    import mwparserfromhell  # noqa: PLC0415  used once, at the demo's first call

    end = BACK_MATTER.search(markup)
    code = mwparserfromhell.parse(markup[: end.start()] if end else markup)
    for node in code.filter(recursive=True, matches=_is_no_prose):
        _remove(code, node)
    text = code.strip_code(normalize=True, collapse=True).replace("''", "")
    return re.sub(r"\n\s*\n+", "\n\n", text).strip() + "\n"


def _is_no_prose(node: Any) -> bool:
    if hasattr(node, "tag"):
        return str(node.tag).lower() in ("ref", "table", "gallery", "math", "timeline")
    return re.match(r"\[\[\s*(file|image|category)\s*:", str(node), re.IGNORECASE) is not None


def _remove(code: Any, node: Any) -> None:
    try:
        code.remove(node)
    except ValueError:  # it went with a node that held it
        return
