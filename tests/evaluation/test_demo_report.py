"""The report says what the figures say, whichever arm is better, and the page needs nothing but itself."""

from __future__ import annotations

import re
from pathlib import Path

from evaluation.demo.report import findings, html_page, markdown_report, write_report
from evaluation.plots import COLORS, INK, kv_growth, save_png, to_svg
from tests.evaluation.results import demo_results


def test_it_says_where_orthros_is_worse() -> None:
    tokens, flops, speed, prefill, decode, cache = findings(demo_results())
    assert "worse than the transformer by 0.1000 nats" in tokens
    assert "worse than the transformer by 0.2000 nats" in flops
    assert "1.50× the FLOPs" in flops
    assert "ran 5 steps instead of 3" in flops
    assert "takes 2.00× the time" in speed
    assert "1.25× slower at 256 tokens and 3.00× faster at 1,024" in prefill
    assert "2.00× faster after 1,024 tokens" in decode
    assert "agree with the full forward" in cache


def test_it_says_where_orthros_is_better() -> None:
    better = demo_results(nll={"transformer": 2.0, "orthros": 1.9, "transformer-equal-flops": 1.95})
    tokens, flops, *_ = findings(better)
    assert "better than the transformer by 0.1000" in tokens
    assert "better than the transformer by 0.0500" in flops


def test_several_seeds_have_a_spread() -> None:
    results = demo_results((42, 43, 44))
    results["runs"]["44"]["orthros"]["validation_nll"] = 1.5
    tokens = findings(results)[0]
    assert "over 3 seeds, worse in 2 of them" in tokens
    assert re.search(r"\| Orthros \| 3 \| 300 \| 4\.500e\+01 \| 1\.8367 ± 0\.2916 \|", markdown_report(results))


def test_a_failed_cache_check_is_shouted() -> None:
    results = demo_results()
    results["cache_check"]["passed"] = False
    results["cache_check"]["cases"][0]["passed"] = False
    assert "DO NOT AGREE" in findings(results)[-1]
    assert "| float64 | 3 | 1.00e-13 | 1.0e-08 | FAIL |" in markdown_report(results)


def test_tables_hold_the_measurements() -> None:
    text = markdown_report(demo_results())
    assert "| 1,024 | 90.0 ms | 30.0 ms | 3.00 | 2.00 |" in text
    assert "| 256 | 2.00 ms | 3.00 ms | 0.67 |" in text
    assert "None of these figures is the paper's" in text
    assert "MACBETH.\nIs this <b>a</b> dagger?" in text


def test_the_page_is_self_contained_and_escapes_the_sample(tmp_path: Path) -> None:
    markdown, page = write_report(demo_results(), tmp_path)
    content = page.read_text(encoding="utf-8")
    assert content.count("<svg") == 4
    assert not re.findall(r'(?:src|href)="(?!#)', content.replace('xlink:href="#', ""))
    assert "<script" not in content
    assert "&lt;b&gt;a&lt;/b&gt;" in content
    for name in re.findall(r"\]\((plots/\w+\.png)\)", markdown.read_text(encoding="utf-8")):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_plots_follow_the_theme_of_the_page() -> None:
    svg = to_svg(kv_growth([{"prompt_length": 1, "entries": [[1, 2, 3]]}], 2))
    assert "currentColor" in svg
    assert INK not in svg
    assert COLORS["orthros"] in svg


def test_layers_that_differ_are_drawn_apart() -> None:
    equal = kv_growth([{"prompt_length": 1, "entries": [[1, 2, 3], [1, 2, 3]]}], None)
    differing = kv_growth([{"prompt_length": 1, "entries": [[1, 2, 3], [1, 2, 2]]}], None)
    drawn = [{tuple(line.get_ydata()) for line in figure.axes[0].lines} for figure in (equal, differing)]
    assert [len(lines) for lines in drawn] == [1, 2]


def test_the_png_is_on_white(tmp_path: Path) -> None:
    save_png(kv_growth([{"prompt_length": 1, "entries": [[1, 2]]}], None), tmp_path / "plots" / "kv.png")
    from PIL import Image  # noqa: PLC0415

    with Image.open(tmp_path / "plots" / "kv.png") as image:
        assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)


def test_markdown_becomes_tables_and_inline_plots() -> None:
    figures = {"kv": kv_growth([{"prompt_length": 1, "entries": [[1, 2]]}], None)}
    page = html_page("| a | b |\n| --- | ---: |\n| 1 | 2 |\n\n![KV growth](plots/kv.png)\n", figures)
    assert '<td style="text-align:right">2</td>' in page
    assert "<figure><svg" in page
    assert "plots/kv.png" not in page
