"""The worked examples of few-shot tasks, the same however many ranks share the documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask


def draw_as_one_rank(task: ConfigurableTask, rank: int, world_size: int) -> None:
    """Give every document of `task` the examples that it has where one rank asks for all of them.

    lm-eval draws from one random generator, document after document. Rank r answers for the documents r, r + world_size
    and so on, in that order; here it also makes, and drops, the draws for those between them.

    Args:
        task: with the seed of its examples set, and no document drawn for; changed in place.
        rank: of this process.
        world_size: ranks that share the documents.
    """
    sampler: Any = getattr(task, "sampler", None)
    if sampler is None or world_size == 1:
        return
    draw, before = sampler.sample, rank

    def sample(*arguments: Any, **options: Any) -> Any:
        nonlocal before
        for _ in range(before):
            draw(*arguments, **options)
        before = world_size - 1
        return draw(*arguments, **options)

    sampler.sample = sample
