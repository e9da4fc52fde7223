"""The lm-eval adapter: either arm answers the harness's requests, scored and prefilled as the method allows.

Tokenization follows lm-eval's own `hf` model, so that scores are comparable: BOS only where the tokenizer adds it or
`add_bos_token` asks for it, never twice; a continuation is what the joint encoding has behind the context's own;
truncation is from the left.

    simple_evaluate(model=OrthrosLM(pretrained="DIR"), tasks=[…])
    python -m evaluation.harness --model orthros --model_args pretrained=DIR --tasks hellaswag
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jinja2.exceptions import TemplateError
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from torch import Tensor
from torch import distributed as dist

from evaluation.generation import continue_prompts
from evaluation.model_folder import is_out_of_memory
from evaluation.model_source import EvaluatedModel, load_evaluated_model, settled_source
from evaluation.ranks import from_rank_0, join_ranks, own_device
from evaluation.scoring import CHUNK_SIZE, BatchLimit, Scorer
from evaluation.suites.task_card import DEFAULT_NEW_TOKENS
from evaluation.text_tokens import encode, prefix_token, whole_text
from orthros_train.data.progress import Progress
from orthros_train.errors import InputError


@register_model("orthros")
class OrthrosLM(TemplateLM):
    """An evaluated model behind lm-eval's interface.

    Args:
        pretrained: a folder (`model_source.load_evaluated_model`), or a model that is loaded already.
        batch_size: sequences of one forward, or "auto".
        device: torch device (`ranks.own_device`); a loaded model stays where it is.
        dtype: one of model_folder.DTYPES, or torch's name of it.
        max_length: most tokens that the model reads, no more than its positions; None: these.
        add_bos_token: whether texts begin with BOS, also where the tokenizer adds none; None: as it does by itself.
        base_window: read a Llama-family folder as Orthros with this window.
        base_sinks: its sinks.
        share_prefix: prefill what requests have in common once.
        chunk_size: columns of one forward over a long context.
        give_up: asked between batches; once it is true, the rest is left undone: `gave_up` says so, and the answers are
            of no use.
        max_batch_size: accepted because the harness passes it; an automatic batch is limited by memory.
    """

    backend = "causal"

    def __init__(
        self,
        pretrained: str | EvaluatedModel,
        batch_size: int | str | None = "auto",
        device: str | None = "cpu",
        dtype: str = "auto",
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        base_window: int | None = None,
        base_sinks: int | None = None,
        share_prefix: bool = True,
        chunk_size: int = CHUNK_SIZE,
        give_up: Callable[[], bool] | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if isinstance(pretrained, EvaluatedModel):
            self._made_group = join_ranks(pretrained.model.device)
        else:
            place = own_device(device or "cpu")
            self._made_group = join_ranks(place)
            pretrained = load_evaluated_model(
                from_rank_0(partial(settled_source, pretrained)),
                dtype=dtype,
                device=str(place),
                base_window=base_window,
                base_sinks=base_sinks,
            )
        if dist.is_initialized():
            self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self.evaluated = pretrained
        self.model: Any = pretrained.model
        self.tokenizer: Any = pretrained.tokenizer
        self.batch_size = batch_size or "auto"
        self._limit = BatchLimit.of(self.batch_size, self.model)
        self.max_length = self._checked_length(max_length)
        if add_bos_token and self.tokenizer.bos_token_id is None:
            raise InputError(
                f"add_bos_token was asked for, but the tokenizer of {pretrained.source} has no BOS; leave it out"
            )
        self.add_bos_token = add_bos_token
        self._scorer = Scorer(self.model, self.batch_size, share_prefix, int(chunk_size))
        self._chunk_size = int(chunk_size)
        self._asked_to_give_up = give_up
        self.gave_up = False
        self.truncated: Counter[str] = Counter()  # requests of each task that did not fit into max_length
        self.not_finite: Counter[str] = Counter()  # requests of each task whose log-likelihood is no finite number
        self._asked: Sequence[Instance] = ()  # the requests at hand
        self._counted: set[tuple[int, int]] = set()  # ids of a counter and of a request that is in it

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> OrthrosLM:
        """From --model_args, which win over the harness's own options. Raises InputError for one that is none."""
        known = set(inspect.signature(cls).parameters) - {"give_up"}
        if unknown := sorted(arg_dict.keys() - known):
            raise InputError(f"--model_args {', '.join(unknown)}: not known; there are {', '.join(sorted(known))}")
        if "pretrained" not in arg_dict:
            raise InputError("--model_args names no model; give pretrained=DIR")
        given = {name: value for name, value in (additional_config or {}).items() if value is not None}
        return cls(**{**given, **arg_dict})

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> OrthrosLM:
        """As `create_from_arg_obj`, from `name=value,name=value`."""
        return cls.create_from_arg_obj(utils.simple_parse_args_string(arg_string), additional_config)

    def _checked_length(self, max_length: int | None) -> int:
        positions = int(self.model.config.max_position_embeddings)
        if max_length and int(max_length) > positions:
            raise InputError(
                f"max_length {max_length} exceeds the {positions} positions of {self.evaluated.source}; lower it, or, "
                "to try the model beyond them, set max_position_embeddings in its config.json (RoPE has no last one)"
            )
        return int(max_length or positions)

    # Ranks.

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside the block this rank answers for all documents, and the others do nothing."""
        rank, size = self._rank, self._world_size
        self._rank, self._world_size = 0, 1
        try:
            yield
        finally:
            self._rank, self._world_size = rank, size

    def leave_ranks(self) -> None:
        """End the process group, if this object made it."""
        if self._made_group:
            dist.destroy_process_group()
            self._made_group = False

    def all_gather(self, tensor: Tensor) -> Tensor:
        """One value of each rank, as a vector."""
        if self.world_size == 1:
            return tensor
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(gathered, tensor)
        return torch.stack(gathered)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Every rank's object on rank `dst`, None elsewhere."""
        if self.world_size == 1:
            return [obj]
        gathered = [None] * self.world_size if self.rank == dst else None
        dist.gather_object(obj, gathered, dst)
        return gathered

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()

    # Tokens.

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The context of a text without one: BOS, or EOS where the tokenizer has none."""
        return prefix_token(self.tokenizer)

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in the harness's request cache."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text. BOS is added if asked for, else as configured, but not to a text that begins with it."""
        return encode(self.tokenizer, string, self.add_bos_token, add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as one text, in the tokenizer's own template.

        Where the template refuses a system message, that message is left out, as lm-eval's `hf` does.
        """
        if not self.tokenizer.chat_template:
            raise InputError(f"the tokenizer of {self.evaluated.source} has no chat template; leave --chat out")
        render = partial(
            self.tokenizer.apply_chat_template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        try:
            return str(render(chat_history))
        except TemplateError:
            try:
                return str(render([message for message in chat_history if message["role"] != "system"]))
            except TemplateError as error:
                source = self.evaluated.source
                raise InputError(f"the chat template of {source} refuses the conversation: {error}") from error

    # Requests.

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """(log-likelihood, would be decoded greedily) of each continuation after its context."""
        self._asked, self._counted = requests, set()
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = True, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = []
        for index, (key, context, continuation) in enumerate(requests):
            if not continuation:
                text, asked = key or ("", "")
                raise InputError(
                    f"the context {text[-40:]!r} and the continuation {asked!r} merge into the context's tokens, so "
                    "the continuation has no token of its own to score; begin it with a space"
                )
            if len(continuation) > self.max_length:
                raise InputError(
                    f"a continuation of {len(continuation)} tokens exceeds the model's {self.max_length}; no context "
                    "would be left to score it by"
                )
            excess = len(context) + len(continuation) - (self.max_length + 1)
            if excess > 0:
                self._count(self.truncated, self._asked[index])
            pairs.append((context[max(excess, 0) :], continuation))
        results = self._score(pairs)
        self._count_not_finite([value for value, _ in results])
        for (key, _, _), result in zip(requests, results, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, result)
        return results

    def _count(self, counter: Counter[str], request: Instance) -> None:
        """Count a request once: the harness repeats a rank's last one until all ranks have the same number."""
        if (id(counter), id(request)) not in self._counted:
            self._counted.add((id(counter), id(request)))
            counter[request.task_name or ""] += 1

    def _count_not_finite(self, values: Sequence[float]) -> None:
        """Count those of the requests at hand whose log-likelihood among `values` is NaN or infinite."""
        for request, value in zip(self._asked, values, strict=True):
            if not math.isfinite(value):
                self._count(self.not_finite, request)

    def _give_up(self) -> bool:
        self.gave_up = self.gave_up or (self._asked_to_give_up is not None and self._asked_to_give_up())
        return self.gave_up

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        with Progress("scoring", len(pairs), shown=self.rank == 0) as progress:
            total = f"{len(pairs):,} continuations"
            results = self._scorer.score(
                pairs, lambda done: progress.update(done, f"{done:,} of {total}"), self._give_up
            )
        return [(value, greedy) for value, greedy in results]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Log-likelihood of whole texts: disjoint windows of at most max_length tokens, each with as much context.

        The prefix token is context, once: where the tokenizer adds BOS, lm-eval's `hf` predicts that BOS from another.
        """
        self._asked, self._counted = requests, set()
        windows: list[tuple[list[int], list[int]]] = []
        counts = []
        for request in requests:
            tokens = whole_text(self.tokenizer, request.args[0], self.add_bos_token)
            parts = utils.get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            disjoint = [utils.make_disjoint_window(part) for part in parts]
            windows += disjoint
            counts.append(len(disjoint))
        scores = iter(self._score(windows))
        sums = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        self._count_not_finite(sums)
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Continuations, cut before the first stop string."""
        self._counted = set()
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        groups: dict[str, list[int]] = {}
        for index in sorted(range(len(requests)), key=lambda index: -len(prompts[index])):
            groups.setdefault(repr(requests[index].args[1]), []).append(index)
        texts = [""] * len(requests)
        with Progress("generating", len(requests), shown=self.rank == 0) as progress:
            done = 0
            for members in groups.values():
                start = 0
                while start < len(members) and not self._give_up():
                    batch = self._generation_batch(members[start:], prompts, requests)
                    start += len(batch)
                    for index, text in zip(batch, self._generate(batch, prompts, requests), strict=True):
                        texts[index] = text
                        self.cache_hook.add_partial("generate_until", requests[index].args, text)
                    done += len(batch)
                    progress.update(done, f"{done:,} of {len(requests):,} texts")
        return texts

    def _generation_batch(
        self, members: Sequence[int], prompts: Sequence[list[int]], requests: Sequence[Instance]
    ) -> Sequence[int]:
        """The first of `members` (longest prompts first) that fit into one batch."""
        room = len(prompts[members[0]]) + self._new_tokens(requests[members[0]])
        count = 1
        while count < len(members) and self._limit.fits(count + 1, min(room, self._chunk_size), room):
            count += 1
        return members[:count]

    def _new_tokens(self, request: Instance) -> int:
        return normalize_gen_kwargs(request.args[1], DEFAULT_NEW_TOKENS)["max_gen_toks"]

    def _generate(self, batch: Sequence[int], prompts: Sequence[list[int]], requests: Sequence[Instance]) -> list[str]:
        """Continuations of a batch; where an automatic one does not fit into memory, in halves."""
        try:
            return self._generate_together(batch, prompts, requests)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if self._limit.rows is not None or len(batch) == 1:
                raise InputError(
                    f"out of memory with {len(batch)} prompt(s) of up to {max(len(prompts[i]) for i in batch)} tokens "
                    f"and {self._new_tokens(requests[batch[0]])} new ones; use a smaller --batch-size, --dtype bf16, "
                    "or a smaller --max-length"
                ) from error
        middle = len(batch) // 2  # outside the handler, whose traceback holds on to the memory
        return self._generate(batch[:middle], prompts, requests) + self._generate(batch[middle:], prompts, requests)

    def _generate_together(
        self, batch: Sequence[int], prompts: Sequence[list[int]], requests: Sequence[Instance]
    ) -> list[str]:
        options: dict[str, Any] = dict(normalize_gen_kwargs(requests[batch[0]].args[1], DEFAULT_NEW_TOKENS))
        new_tokens, until = options.pop("max_gen_toks"), options.pop("until")
        if not options.get("do_sample"):
            options.pop("temperature", None)
        stops = handle_stop_sequences(until, eos=self.tokenizer.decode([self.eot_token_id]))
        room = self.max_length - new_tokens
        if room < 1:
            can_be_set = self.max_length < int(self.model.config.max_position_embeddings)
            raise InputError(
                f"{new_tokens} new tokens leave no room for a prompt within {self.max_length}; "
                + ("set a greater --max-length or " if can_be_set else "")
                + "choose tasks with shorter answers"
            )
        texts = continue_prompts(
            self.model,
            self.tokenizer,
            [prompts[index][-room:] for index in batch],
            stops,
            new_tokens,
            options,
            self._chunk_size,
        )
        for index in batch:
            if len(prompts[index]) > room:
                self._count(self.truncated, requests[index])
        return [postprocess_generated_text(text, stops, None) for text in texts]

    def get_model_info(self) -> dict[str, Any]:
        """What results.json says about the model."""
        config = self.model.config
        return {
            "model_num_parameters": self.model.num_parameters(),
            "model_dtype": str(self.model.dtype).removeprefix("torch."),
            "model_source": self.evaluated.source,
            "model_kind": self.evaluated.kind,
            "architecture": config.architecture,
            "base_window": config.base_window,
            "base_sinks": config.base_sinks,
            "max_length": self.max_length,
        }
