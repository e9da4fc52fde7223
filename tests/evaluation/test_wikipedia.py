"""Articles out of a dump: prose stays, everything that is not prose goes, short and foreign pages are left out."""

from __future__ import annotations

import bz2
import zipfile
from pathlib import Path
from xml.sax.saxutils import escape

import pytest

from evaluation.demo import wikipedia
from orthros_train.errors import InputError

MARKUP = """{{Infobox|name=Stone}}
'''Stone''' is a [[rock (geology)|rock]].<ref>A. Author, ''A book''.</ref> It is ''hard''<ref name="b" />.
[[File:Stone.jpg|thumb|A picture of [[stone]]s]]
{| class="wikitable"
| cell || other<ref>in a table</ref>
|}

== Uses ==
Walls &amp; roads.
[[Category:Stones]]

== See also ==
* [[Pebble]]
"""


def dump_of(pages: list[tuple[str, str, str]]) -> bytes:
    """A MediaWiki export of (title, namespace, markup)."""
    body = "".join(
        f"<page><title>{title}</title><ns>{ns}</ns><revision><text>{escape(text)}</text></revision></page>"
        for title, ns, text in pages
    )
    return f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.8/">{body}</mediawiki>'.encode()


def test_prose_stays_alone() -> None:
    text = wikipedia.plain_text(MARKUP)
    assert text.split() == ["Stone", "is", "a", "rock.", "It", "is", "hard.", "Uses", "Walls", "&", "roads."]


def test_short_pages_and_other_namespaces_are_left_out() -> None:
    long = "A sentence about stones. " * 100
    pages = [("Stone", "0", long), ("Redirect", "0", "#REDIRECT [[Stone]]"), ("Talk:Stone", "1", long)]
    assert [title for title, _ in wikipedia.articles_of_dump(dump_of(pages))] == ["Stone"]


def test_articles_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def download(requirement: str, folder: Path) -> Path:
        calls.append(requirement)
        archive = folder / "gensim-4.4.0-any.whl"
        with zipfile.ZipFile(archive, "w") as package:
            name = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p1p2-shortened.bz2"
            package.writestr(name, bz2.compress(dump_of([("Stone", "0", "A sentence about stones. " * 100)])))
        return archive

    monkeypatch.setattr(wikipedia, "download", download)
    first, again = wikipedia.wikipedia_articles(tmp_path), wikipedia.wikipedia_articles(tmp_path)
    assert list(first) == ["Stone"]
    assert first == again
    assert calls == [wikipedia.PACKAGE]
    (tmp_path / "wikipedia.json").write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match=r"wikipedia\.json is not JSON .*remove it and run again"):
        wikipedia.wikipedia_articles(tmp_path)


@pytest.mark.parametrize("content", ["no zip", None])
def test_a_foreign_package_is_refused(content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "gensim-4.4.0-any.whl"
    if content is None:
        zipfile.ZipFile(archive, "w").close()
    else:
        archive.write_text(content, encoding="utf-8")
    monkeypatch.setattr(wikipedia, "download", lambda *_: archive)
    with pytest.raises(InputError, match=r"gensim==.* does not hold the expected articles"):
        wikipedia.wikipedia_articles(tmp_path / "cache")
