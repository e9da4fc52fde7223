"""The report says what the figures say, whichever arm is better, and the page needs nothing but itself."""

from __future__ import annotations

import re
from pathlib import Path

from evaluation.demo.findings import findings
from evaluation.demo.report import markdown_report, write_report
from evaluation.html_page import html_page
from evaluation.plots import COLORS, INK, kv_growth, save_png, to_svg, validation_nll
from tests.evaluation.results import demo_results


def test_it_says_where_orthros_is_worse() -> None:
    tokens, flops, speed, prefill, decode, cache = findings(demo_results())
    assert "worse than the transformer by 0.1000 nats" in tokens
    assert "worse than the transformer by 0.2000 nats" in flops
    assert "1.50× the FLOPs" in flops
    assert "ran 5 steps instead of 3" in flops
    assert "take Orthros 2.00× the transformer's time" in speed
    assert "1.25× slower at 256 tokens and 3.00× faster at 1,024 tokens" in prefill
    assert "1.50× slower after 256 tokens and 2.00× faster after 1,024 tokens" in decode
    assert "agree with the full forward" in cache


def test_it_says_where_orthros_is_better() -> None:
    better = demo_results(nll={"transformer": 2.0, "orthros": 1.9, "transformer-equal-flops": 1.95})
    tokens, flops, *_ = findings(better)
    assert "better than the transformer by 0.1000" in tokens
    assert "better than the transformer by 0.0500" in flops


def test_one_length_is_named_once() -> None:
    results = demo_results()
    results["decode"] = [record for record in results["decode"] if record["context"] == 256]
    assert "Orthros is 1.50× slower after 256 tokens." in findings(results)[4]


def test_one_seed_says_that_no_spread_is_known() -> None:
    results = demo_results((7,))
    for line in findings(results)[:2]:
        assert re.search(r"by 0\.\d000 nats per byte \(one seed: no spread known; `--seeds 7,8,9`\)", line)
    text = markdown_report(results)
    assert "| validation NLL (one seed) |" in text
    assert "One seed: no spread known; `--seeds 7,8,9`." in text
    assert "±" not in text


def test_several_seeds_have_a_spread() -> None:
    results = demo_results((42, 43, 44))
    results["runs"]["44"]["orthros"]["validation_nll"] = 1.5
    tokens, flops, *_ = findings(results)
    assert "better than the transformer by 0.0733 ± 0.3002 nats per byte" in tokens
    assert "(mean ± standard deviation over 3 seeds; better in 1 of them)" in tokens
    assert "worse than the transformer by 0.0267 ± 0.3002" in flops
    assert "worse in 2 of them" in flops
    text = markdown_report(results)
    assert re.search(r"\| Orthros \| 3 \| 300 \| 4\.500e\+01 \| 1\.8367 ± 0\.2916 \|", text)
    assert "one seed" not in text.lower()


def test_the_plot_tells_one_seed_from_several() -> None:
    one, several = (validation_nll({"orthros": values}).axes[0] for values in ([2.0], [1.0, 3.0]))
    assert "one seed, no spread known" in one.get_xlabel()
    assert "mean ± standard deviation over 2 seeds" in several.get_xlabel()
    assert [text.get_text() for axes in (one, several) for text in axes.texts] == ["2.0000", "2.0000 ± 1.4142"]


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


def test_it_says_how_it_was_measured() -> None:
    text = " ".join(markdown_report(demo_results()).split())
    assert "A transformer (870,000 parameters) and an Orthros model (872,064 parameters" in text
    assert "batches of 8 rows of 256 tokens" in text
    assert "Peak learning rate 0.004 in every arm, chosen somewhere; 20 steps of warm-up, then cosine." in text
    assert "medians of 3 prompts of a length and of 3 decoding steps" in text
    assert "took up to 2.0× the fastest one's time" in text
    assert "Measured in turn (5 repeats, medians)" in text
    assert "one micro-batch of 4 rows" in text
    assert "All 5 steps together took 4.0 minutes" in text
    assert "before the first step it was 0.2" in text
    assert "| Training: orthros, seed 42 | 2026-01-02 03:04:05 UTC | 60.0 s | 0.2 | 2.0 |" in text


def test_steps_of_one_origin_need_no_warning() -> None:
    text = markdown_report(demo_results())
    assert "- Machine (all steps): a processor, 2 cores, 23 GiB; Python 3.11.7.\n- Commit (all steps): abc123." in text
    assert "different" not in text


def test_steps_of_several_commits_are_told_apart() -> None:
    results = demo_results()
    results["steps"]["times-42"]["machine"]["commit"] = "def456-dirty"
    results["runs"]["42"]["orthros"]["commits"] = ["abc123", None]  # continued where git is not
    text = markdown_report(results)
    assert "**The steps of this report come from different commits**" in text
    assert "- Commit (times-42): def456-dirty." in text
    assert "- Commit (train-orthros-42): unknown (not a git checkout)." in text
    assert "- Commit (text, train-transformer-42, train-orthros-42, train-transformer-equal-flops-42): abc123." in text
    assert "- Machine (all steps)" in text


def test_steps_of_several_machines_are_told_apart() -> None:
    results = demo_results()
    results["steps"]["times-42"]["machine"]["processor"] = "another"
    text = markdown_report(results)
    assert "**The steps of this report come from different machines**" in text
    assert "- Machine (times-42): another, 2 cores" in text
    results["steps"]["times-42"]["machine"]["commit"] = "def456"
    assert "come from different commits and different machines" in markdown_report(results)


def test_times_of_a_busy_machine_are_called_so() -> None:
    results = demo_results()
    results["steps"]["times-42"]["load_average"] = [0.1, 5.04]
    busy = "**Busy machine:** the times were taken at a load of 5.0 on 2 cores"
    assert any(line.startswith(busy) for line in findings(results))
    results["steps"]["times-42"]["load_average"] = [9.0, 2.0]
    assert "Busy" not in markdown_report(results)


def test_a_system_without_load_says_so() -> None:
    results = demo_results()
    for step in results["steps"].values():
        step["load_average"] = [None, None]
    assert "| 57.0 s | unknown | unknown |" in markdown_report(results)


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
    page = html_page("Orthros demo", "| a | b |\n| --- | ---: |\n| 1 | 2 |\n\n![KV growth](plots/kv.png)\n", figures)
    assert '<td style="text-align:right">2</td>' in page
    assert "<figure><svg" in page
    assert "plots/kv.png" not in page
