"""A model of this package as lm-eval knows models: every lm-eval task can be run with any adapter.

    lm = JaxLM(ask)                                       # evals.ask.ModelAsk: model, parameters, tokenizer
    lm_eval.simple_evaluate(lm, tasks=["arc_easy"], limit=200)

Encoding, truncation, stop strings and the empty context are those of lm-eval's own `hf` backend. Adapters read the system
text where there is one: that of a chat template, or `system_instruction` standing raw at a prompt's beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from calyrex_jax.core.errors import UserError
from calyrex_jax.data import chat
from calyrex_jax.evals.ask import ModelAsk
from calyrex_jax.generate import loop
from calyrex_jax.generate.continuations import Prompt, choice_scores, continuation_scores
from calyrex_jax.generate.sampling import Sampling

MAX_GEN_TOKENS = 256  # where a task names none, as lm-eval's hf backend has it


class JaxLM(TemplateLM):
    """An LM over a `ModelAsk`; `system_instruction` is the system text that lm-eval writes raw where no template is used."""

    def __init__(self, ask: ModelAsk, system_instruction: str = ""):
        super().__init__()
        self.ask = ask
        self.tokenizer = ask.reader.tokenizer.fast
        # text from a prompt's first character to the end of its system text -> the system text's ranges
        self._heads: dict[str, list[tuple[int, int]]] = {}
        if system_instruction:
            self._heads[system_instruction] = [(0, len(system_instruction))]

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's end-of-text id."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What an empty context begins with: the tokenizer's beginning-of-text id, else its end-of-text id."""
        return self.tokenizer.eos_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    @property
    def max_length(self) -> int:
        """The backbone's positions."""
        return self.ask.reader.positions

    @property
    def max_gen_toks(self) -> int:
        """New tokens where a task names none."""
        return MAX_GEN_TOKENS

    @property
    def batch_size(self) -> int:
        """Rows a batch, at most."""
        return self.ask.batch_size

    @property
    def tokenizer_name(self) -> str:
        """For lm-eval's request caches."""
        return self.ask.reader.tokenizer.name

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template in use, for lm-eval's records."""
        policy, tokenizer = self.ask.reader.policy, self.ask.reader.tokenizer
        return (policy.chat_template or tokenizer.chat_template) if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation's text; where its system text stands is remembered."""
        text, system = chat.render(
            self.ask.reader.tokenizer,
            chat_history,
            for_generation=add_generation_prompt,
            policy=self.ask.reader.policy,
            where="lm-eval conversation",
        )
        if system:
            self._heads[text[: system[-1][1]]] = system
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids as the hf backend has them: special tokens as the tokenizer adds them, unless the text begins with one."""
        return self._encode(string, add_special_tokens)[0].tolist()

    def _encode(self, string: str, add_special_tokens: bool | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Ids int32 [T] and character offsets [T, 2]."""
        if add_special_tokens is None:
            add_special_tokens = not has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id))
        made = self.tokenizer(string, add_special_tokens=add_special_tokens, return_offsets_mapping=True)
        return np.array(made["input_ids"], np.int32), np.array(made["offset_mapping"], np.int32).reshape(-1, 2)

    def _prompt(self, text: str, tokens: Sequence[int]) -> Prompt:
        """`tokens`, which begin as those of `text` do, and which of them belong to its system text."""
        tokens = np.asarray(tokens, np.int32)
        system = np.zeros(len(tokens), bool)
        for head, ranges in self._heads.items():
            if text.startswith(head):
                offsets = self._encode(text)[1][: len(tokens)]
                for start, end in ranges:
                    inside = (offsets[:, 0] < end) & (offsets[:, 1] > start) & (offsets[:, 1] > offsets[:, 0])
                    system[: len(offsets)] |= inside
                break
        return Prompt(tokens, system)

    # Log-likelihoods

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Continuations of one token share one pass over their context; all others are scored whole."""
        results: list[tuple[float, bool] | None] = [None] * len(requests)
        choices: dict[tuple[int, ...], list[int]] = {}
        longer: list[int] = []
        for index, (_, context, continuation) in enumerate(requests):
            if len(continuation) == 1:
                choices.setdefault(tuple(context), []).append(index)
            else:
                longer.append(index)
        for group, logprobs, best in self._choices(requests, list(choices.items())):
            for index, found in zip(group, logprobs):
                results[index] = float(found), requests[index][2][0] == best
        for index, total, greedy in self._continuations(requests, longer):
            results[index] = total, greedy
        for (strings, _, _), result in zip(requests, results):
            if strings is not None:
                self.cache_hook.add_partial("loglikelihood", strings, result)
        return results

    def _choices(self, requests, groups):
        """(indices of the requests, their log-probabilities, the most probable id) of each context."""
        limit = self.max_length
        prompts = []
        for context, indices in groups:
            text = requests[indices[0]][0]
            prompt = self._prompt("" if text is None else text[0], context)
            prompts.append(Prompt(prompt.tokens[-limit:], prompt.system[-limit:]))
        ids = [[requests[index][2][0] for index in indices] for _, indices in groups]
        for rows, chosen in self.ask.batches([len(p.tokens) for p in prompts], 0):
            found = choice_scores(
                self.ask.model,
                self.ask.params,
                [prompts[i] for i in chosen],
                [ids[i] for i in chosen],
                pad_id=self.ask.reader.tokenizer.pad_id,
                batch_size=rows,
                progress=self.ask.progress(),
            )
            for at, logprobs, best in found:
                yield groups[chosen[at]][1], logprobs, best

    def _continuations(self, requests, indices):
        """(index, log-probability, greedy) of requests with longer continuations."""
        limit = self.max_length + 1  # the last token is predicted and never read
        sequences, starts = [], []
        for index in indices:
            strings, context, continuation = requests[index]
            if len(continuation) > self.max_length:
                raise UserError(
                    f"lm-eval: a continuation has {len(continuation)} tokens, but the backbone has {self.max_length} positions"
                )
            prompt = self._prompt("" if strings is None else "".join(strings), [*context, *continuation])
            cut = max(len(prompt.tokens) - limit, 0)
            sequences.append(Prompt(prompt.tokens[cut:], prompt.system[cut:]))
            starts.append(max(len(context) - cut, 1))
        for rows, chosen in self.ask.batches([len(s.tokens) for s in sequences], 0):
            found = continuation_scores(
                self.ask.model,
                self.ask.params,
                [sequences[i] for i in chosen],
                [starts[i] for i in chosen],
                pad_id=self.ask.reader.tokenizer.pad_id,
                batch_size=rows,
                progress=self.ask.progress(),
            )
            for at, total, greedy in found:
                yield indices[chosen[at]], total, greedy

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Whole texts, in windows of the backbone's positions where they are longer."""
        windows, owners = [], []
        for owner, (text,) in enumerate(request.args for request in requests):
            for context, continuation in map(
                make_disjoint_window,
                get_rolling_token_windows(
                    token_list=self.tok_encode(text),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                ),
            ):
                windows.append((None, context, continuation))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (found, _) in zip(owners, self._loglikelihood_tokens(windows)):
            totals[owner] += found
        for request, total in zip(requests, totals):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # Generation

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Replies up to a stop string; requests with the same settings run together."""
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(index)
        results = [""] * len(requests)
        for indices in groups.values():
            for index, text in self._generated(requests, indices):
                results[index] = text
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
        return results

    def _generated(self, requests, indices):
        """(index, text) of requests that share their settings."""
        settings = normalize_gen_kwargs(requests[indices[0]].args[1], self.max_gen_toks)
        eos = self.tokenizer.decode([self.eot_token_id], skip_special_tokens=False)
        until, new_tokens = handle_stop_sequences(settings["until"], eos=eos), settings["max_gen_toks"]
        room = self.max_length - new_tokens
        if room < 1:
            raise UserError(f"lm-eval: {new_tokens} new tokens leave no room in the backbone's {self.max_length} positions")
        prompts = []
        for index in indices:
            text = requests[index].args[0]
            prompt = self._prompt(text, self.tok_encode(text))
            prompts.append(Prompt(prompt.tokens[-room:], prompt.system[-room:]))
        for rows, chosen in self.ask.batches([len(p.tokens) for p in prompts], new_tokens):
            replies = loop.stream(
                self.ask.model,
                self.ask.params,
                [prompts[i] for i in chosen],
                max_new_tokens=new_tokens,
                stop_ids=self.ask.stop_ids | {self.eot_token_id} | self._ids_with(until),
                pad_id=self.ask.reader.tokenizer.pad_id,
                sampling=_sampling(settings),
                batch_size=rows,
                vocab_limit=self.ask.reader.tokenizer.vocab_size,
                progress=self.ask.progress(),
            )
            for i, reply in zip(chosen, replies):
                text = self.ask.reader.tokenizer.decode(reply.tokens)
                yield indices[i], postprocess_generated_text(text, until, None)

    def _ids_with(self, until: Sequence[str]) -> frozenset[int]:
        """Ids whose own text holds a stop string: nothing after them is kept, so decoding may end there."""
        return frozenset(i for i, text in enumerate(self._texts) if any(stop and stop in text for stop in until))

    @cached_property
    def _texts(self) -> list[str]:
        """The text of every id on its own."""
        return [self.ask.reader.tokenizer.decode([i]) for i in range(self.ask.reader.tokenizer.vocab_size)]


def _sampling(settings: dict[str, Any]) -> Sampling:
    if not settings.get("do_sample"):
        return Sampling()
    return Sampling(
        temperature=float(settings.get("temperature") or 1.0),
        top_k=int(settings.get("top_k") or 0),
        top_p=float(settings.get("top_p") or 1.0),
    )
