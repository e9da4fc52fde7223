"""Made-up results of a demo, for tests of its report."""

from __future__ import annotations

from typing import Any

NLL = {"transformer": 1.9, "orthros": 2.0, "transformer-equal-flops": 1.8}


def arm(name: str, seed: int, nll: float) -> dict[str, Any]:
    """One arm's record of three steps."""
    steps = 5 if name == "transformer-equal-flops" else 3
    return {
        "steps": steps,
        "tokens": 100 * steps,
        "skipped_steps": 0,
        "loss": [3.0 - 0.1 * step for step in range(steps)],
        "tokens_seen": [100 * (step + 1) for step in range(steps)],
        "flops_per_step": [15 if name == "orthros" else 10] * steps,
        "validation": [[steps, nll]],
        "validation_nll": nll,
        "exported_nll": nll + 1e-8,
        "exported_labels": 640,
        "tokens_per_second": 50.0 if name == "orthros" else 100.0,
        "training_seconds": 9.0,
        "commits": ["abc123"],
        "command": f"python -m orthros_train configs/demo.yaml output_dir={name}-{seed}",
    }


def times(key: str, values: dict[int, tuple[float, float]]) -> list[dict[str, Any]]:
    """Seconds of (transformer, Orthros) at each length."""
    return [
        {
            "arm": name,
            key: length,
            "seconds": seconds,
            "all_seconds": [seconds, 0.9 * seconds, 1.8 * seconds],
            "flops": length * (2 if name == "transformer" else 1),
        }
        for length, pair in values.items()
        for name, seconds in zip(("transformer", "orthros"), pair, strict=True)
    ]


def measured(title: str, seconds: float) -> dict[str, Any]:
    """On what one step was measured."""
    return {
        "title": title,
        "machine": {
            "processor": "a processor",
            "cores": 2,
            "memory_gib": 23.4,
            "versions": {"Python": "3.11.7"},
            "commit": "abc123",
        },
        "started": "2026-01-02T03:04:05+00:00",
        "seconds": seconds,
        "load_average": [0.24, 1.96],
    }


def demo_results(seeds: tuple[int, ...] = (42,), nll: dict[str, float] | None = None) -> dict[str, Any]:
    """Results in which Orthros is worse at equal tokens and at equal FLOPs unless `nll` says otherwise."""
    nll = nll or NLL
    cases = [
        {
            "dtype": dtype,
            "lengths": lengths,
            "chunk_size": None,
            "max_difference": value,
            "bound": bound,
            "passed": True,
        }
        for dtype, value, bound in (("float64", 1e-13, 1e-8), ("float32", 2e-6, 1e-4))
        for lengths in ([1], [9], [1, 9])
    ]
    return {
        "seeds": list(seeds),
        "text": {
            "title": "Shakespeare",
            "source": "Shakespeare's works",
            "license": "public domain",
            "train_bytes": 4_700_000,
            "validation_bytes": 300_000,
            "validation_names": ["Macbeth", "The Tempest"],
        },
        "model": {"hidden_size": 128, "num_hidden_layers": 2, "base_window": 4},
        "parameters": {"transformer": 870_000, "orthros": 872_064},
        "identical": {"weights": 39, "samples": 2560},
        "runs": {
            str(seed): {name: arm(name, seed, value + 0.01 * number) for name, value in nll.items()}
            for number, seed in enumerate(seeds)
        },
        "validation_labels": 640,
        "cache_check": {
            "passed": True,
            "max_difference": {"float64": 1e-13, "float32": 2e-6},
            "base_window": 4,
            "cases": cases,
            "growth": [
                {"prompt_length": length, "entries": [[length, length + 1, length + 2]] * 2} for length in (1, 9)
            ],
        },
        "prefill": times("length", {256: (0.008, 0.010), 1024: (0.09, 0.03)}),
        "decode": times("context", {256: (0.002, 0.003), 1024: (0.004, 0.002)}),
        "training": [
            {"arm": "transformer", "seconds": 0.1, "all_seconds": [0.1] * 5, "flops": 1000},
            {"arm": "orthros", "seconds": 0.2, "all_seconds": [0.2] * 5, "flops": 1500},
        ],
        "sample": {"prompt": "MACBETH.\n", "text": "Is this <b>a</b> dagger?\n", "settings": "--temperature 0.7"},
        "sequence_length": 256,
        "precision": "fp32",
        "ranks": 2,
        "timing_threads": 1,
        "recipe": {
            "global_batch_size": 8,
            "micro_batch_size": 4,
            "learning_rate": 4e-3,
            "rate_origin": "chosen somewhere",
            "schedule": "cosine",
            "warmup_steps": 20,
        },
        "steps": {
            "text": measured("Text", 3.0),
            **{
                f"train-{name}-{seed}": measured(f"Training: {name}, seed {seed}", 60.0)
                for seed in seeds
                for name in nll
            },
            "times-42": measured("Times, seed 42", 57.0),
        },
        "commands": ["python -m orthros_train configs/demo.yaml"],
    }
