"""Generation in evaluations: the model writes the answers of the validation rows, and metrics of texts score them.

    evaluation:
      generate: {max_new_tokens: 64}

For each row of a batch with `input_ids` and `labels`, the prompt is what precedes the last stretch of labels, which is
the expected answer; for an encoder-decoder model, the prompt is the input. The metrics of texts that the validation
step does not return itself, such as `Trainer(metrics=["rouge"])`, get what was written and what was expected. A table
of the first rows goes to the run folder and to trackers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from accmt.addons.benchmark_tasks import TaskSection, find_tokenizer, read_tasks
from accmt.addons.text_metrics import TextMetric
from accmt.data import MicroBatch
from accmt.errors import ArgumentError, HyperParameterError, describe_value, fail, nearest
from accmt.messages import warn_once
from accmt.metrics.accuracy import IGNORED
from accmt.options.checks import KeyFault, is_off
from accmt.options.yaml_reader import suggest
from accmt.processes import data_index, gather_from_data, run_on_main_process
from accmt.run import EvaluationRun, Run
from accmt.run.features import Feature

_EXAMPLES = {
    "generate": "generate: {max_new_tokens: 64}",
    "table_rows": "table_rows: 20",
    "tasks": "tasks: [hellaswag]",
}
_MAX_NEW_TOKENS = 64
_TABLE_ROWS = 20
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
_LIMITS = ("max_new_tokens", "max_length")
_COUNTS = (*_LIMITS, "num_beams", "num_return_sequences")


# ---- The section `evaluation` of the hyper-parameters


@dataclass(frozen=True)
class EvaluationSection:
    """What an evaluation does besides the validation step.

    Attributes:
        generate: Arguments of the model's `generate`; None generates nothing.
        table_rows: The number of rows of each set in the table of generated texts.
        tasks: Tasks of lm-evaluation-harness; None evaluates none.
    """

    generate: Mapping[str, Any] | None = None
    table_rows: int = _TABLE_ROWS
    tasks: TaskSection | None = None

    def directions(self) -> dict[str, Callable[[float, float], bool]]:
        """Return how values of the results compare that are not those of metrics."""
        return {} if self.tasks is None else self.tasks.directions()


def read_evaluation_section(value: Any) -> tuple[EvaluationSection | None, list[KeyFault]]:
    """Return the section and its errors; arguments of `generate` are checked when the model is there."""
    if not isinstance(value, Mapping):
        do = f"write `evaluation: {{{_EXAMPLES['generate']}}}`"
        return None, [KeyFault(("evaluation",), describe_value(value), "a mapping with `generate` or `tasks`", do)]
    values = {str(name): entry for name, entry in value.items() if not is_off(entry) or isinstance(entry, Mapping)}
    faults: list[KeyFault] = []
    if "tasks" in values:
        values["tasks"], faults = read_tasks(values["tasks"])
    for name, entry in values.items():
        if name == "tasks":
            continue
        is_right, expected = (
            isinstance(entry, Mapping) or entry is True,
            "a mapping of arguments of `generate`, or true",
        )
        if name not in _EXAMPLES:
            do = suggest(name, _EXAMPLES, f"remove `{name}`")
            got = f"{name} = {describe_value(entry)}"
            faults.append(KeyFault(("evaluation", name), got, f"one of {', '.join(_EXAMPLES)}", do))
            continue
        if name == "table_rows":
            is_right, expected = type(entry) is int and entry >= 0, "a whole number of at least 0"
        if not is_right:
            faults.append(KeyFault(("evaluation", name), describe_value(entry), expected, f"write `{_EXAMPLES[name]}`"))
    if faults:
        return None, faults
    if values.get("generate") is True:
        values["generate"] = {}
    return EvaluationSection(**values), []


# ---- The feature


class _Row(NamedTuple):
    """A generated text: where its sample lies in the data, and the texts."""

    place: tuple[int, ...]
    prompt: str
    expected: str
    written: str


@dataclass
class _Found:
    """What was generated in a set, on this process."""

    rows: list[_Row] = field(default_factory=list)
    num_written: int = 0
    num_cut_off: int = 0


class Generation(Feature):
    """Lets the model write answers in evaluations."""

    name = "generation"

    def __init__(self, run: EvaluationRun, section: EvaluationSection) -> None:
        self._run = run
        self._section = section
        self._tokenizer = find_tokenizer(run, "evaluation.generate", "decode what is generated")
        self._options = dict(section.generate or {})
        _check_options(run, self._options)
        if all(self._options.get(name) is None for name in _LIMITS):
            self._options["max_new_tokens"] = _MAX_NEW_TOKENS  # a model may never stop by itself
        self._micro_batch: MicroBatch | None = None
        self._found = _Found()

    @classmethod
    def for_run(cls, run: EvaluationRun) -> Generation | None:
        section = run.settings.hps.section("evaluation")
        return None if section is None or section.generate is None else cls(run, section)

    def before_set(self) -> None:
        """Forget the set before."""
        self._found = _Found()

    def before_set_batch(self, micro_batch: MicroBatch) -> None:
        """Note where the batch lies in the data."""
        self._micro_batch = micro_batch

    def add_to_outputs(self, key: str, batch: Any, outputs: Any) -> Any:
        """Generate, and return the texts under the names of the metrics that need them."""
        for name, value in batch.items() if isinstance(batch, Mapping) else ():
            is_of_images = str(name).startswith(("pixel_values", "image_"))  # may be `[patches, values]`
            if isinstance(value, torch.Tensor) and value.is_floating_point() and (value.ndim > 2 or is_of_images):
                got = f"a batch with {name!r} of shape {tuple(value.shape)}"  # images or audio, which a prompt lacks
                do = "return the texts from validation_step, and remove `evaluation.generate`"
                raise fail(ArgumentError, "evaluation.generate", got=got, expected="prompts that are only text", do=do)
        is_labelled = isinstance(batch, Mapping) and {"input_ids", "labels"} <= batch.keys()
        if is_labelled and batch["labels"].ndim == 3:  # several answers of a prompt: the first is the preferred one
            names = [name for name in ("input_ids", "labels", "attention_mask") if name in batch]
            batch = {name: batch[name][:, 0] for name in names}
        if not is_labelled or batch["labels"].ndim != 2:
            got = (
                f"a batch with {sorted(batch)}" if isinstance(batch, Mapping) else f"a batch of {type(batch).__name__}"
            )
            needed = '"input_ids" and "labels" [samples, tokens], to know prompts and expected answers'
            do = "return the texts from validation_step, and remove `evaluation.generate`"
            raise fail(ArgumentError, "evaluation.generate", got=got, expected=needed, do=do)
        is_encoder_decoder = bool(getattr(self._model.config, "is_encoder_decoder", False))
        pairs = _split(batch, is_encoder_decoder=is_encoder_decoder)
        generated = self._generate(pairs, is_encoder_decoder=is_encoder_decoder)
        written = [self._decode(row) for row, _ in generated]
        expected = [None if answer is None else self._decode(answer) for _, answer in pairs]
        if self._micro_batch is not None and self._micro_batch.batch is not None:  # else another process's
            self._note(self._micro_batch, [prompt for prompt, _ in pairs], expected, written)
            answered = [
                is_cut_off for (_, is_cut_off), text in zip(generated, expected, strict=True) if text is not None
            ]
            self._found.num_written += len(answered)
            self._found.num_cut_off += sum(answered)
        entries = dict(outputs) if isinstance(outputs, Mapping) else {"loss": outputs}
        metrics = [metric.name for metric in self._run.metrics[key] if isinstance(metric, TextMetric)]
        return {**dict.fromkeys(metrics, (written, expected)), **entries}

    def after_set(self, key: str, *, has_batch: bool) -> None:
        """Log the table of the set.

        Processes: collective.
        """
        every = gather_from_data(self._found)
        is_trial = self._run.state.now.stage in ("sanity_check", "predict")
        run, number = self._run, sum(found.num_cut_off for found in every)
        total = sum(found.num_written for found in every)
        if number and not is_trial:
            limit = next(f"{name}={self._options[name]}" for name in _LIMITS if self._options.get(name))
            what = f"{number} of {total} generated texts were cut off before they ended"
            warn_once(f"{what} ({limit})", about="generated texts that were cut off")
        if is_trial or not isinstance(run, Run) or not self._section.table_rows:
            return
        rows = sorted((row for found in every for row in found.rows), key=lambda row: row.place)
        if rows:
            run_on_main_process(lambda: self._log_table(run, key, rows[: self._section.table_rows]))

    def _log_table(self, run: Run, key: str, rows: list[_Row]) -> None:
        metrics = [metric for metric in run.metrics[key] if isinstance(metric, TextMetric)]
        scored = [metric for metric in metrics if type(metric).score is not TextMetric.score]
        columns = ["prompt", "expected", "written", *(metric.name for metric in scored)]
        table = [
            [row.prompt, row.expected, row.written, *(metric.score(row.written, row.expected) for metric in scored)]
            for row in rows
        ]
        run.module.log_table(f"generated/{key}" if key else "generated", columns, table)

    @property
    def _model(self) -> Any:
        return self._run.module.unwrapped_model

    def _generate(
        self, pairs: list[tuple[list[int], list[int] | None]], *, is_encoder_decoder: bool
    ) -> list[tuple[list[int], bool]]:
        """Return the new tokens of each prompt, and whether they were cut off.

        Texts end where the expected answers do, too: the configuration of a base model does not know the token that
        ends a turn of a conversation.

        Processes: all, if they share the weights: each generates until all have finished.
        """
        config = copy.deepcopy(self._model.generation_config)
        if not self._options.get("do_sample"):  # what chat models set for sampling means nothing to greedy search
            for name in _SAMPLING:
                setattr(config, name, None)
        config.max_length = None  # only one limit may be set
        config.update(**{"do_sample": False, **self._options, "return_dict_in_generate": False})
        found_ends = config.eos_token_id
        ends = {found_ends} if isinstance(found_ends, int) else set(found_ends or ())
        if "eos_token_id" not in self._options:
            added = getattr(self._tokenizer, "added_tokens_decoder", {})
            ends |= {answer[-1] for _, answer in pairs if answer and answer[-1] in added}
            ends |= {one for one in (getattr(self._tokenizer, "eos_token_id", None),) if one is not None}
            config.eos_token_id = sorted(ends) or None
        pad = next(
            (one for one in (config.pad_token_id, self._tokenizer.pad_token_id, *sorted(ends)) if one is not None), 0
        )
        config.pad_token_id = pad
        # A row without a prompt is generated, too, since all processes have to take part: from one token of padding.
        prompts = [prompt or [pad] for prompt, _ in pairs]
        width = max(map(len, prompts))
        rows, masks = [], []
        for prompt in prompts:
            padding = width - len(prompt)
            before, after = (0, padding) if is_encoder_decoder else (padding, 0)
            rows.append([pad] * before + prompt + [pad] * after)
            masks.append([0] * before + [1] * len(prompt) + [0] * after)
        device = self._run.device
        inputs, mask = torch.tensor(rows, device=device), torch.tensor(masks, device=device)
        extra = {"tokenizer": self._tokenizer} if "stop_strings" in self._options else {}
        found = self._model.generate(input_ids=inputs, attention_mask=mask, generation_config=config, **extra)
        new = found[:: len(found) // len(rows)].tolist()  # the first of `num_return_sequences`
        new = [row[1:] if is_encoder_decoder else row[width:] for row in new]
        limit = config.max_new_tokens or config.max_length - 1  # which counts the first token of the decoder
        has_stop = "stop_strings" in self._options  # after which a text is padded
        return [
            (row, len(row) == limit and not ends.intersection(row) and not (has_stop and row[-1] == pad)) for row in new
        ]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)).strip()

    def _note(
        self, micro_batch: MicroBatch, prompts: list[list[int]], expected: list[str | None], written: list[str]
    ) -> None:
        """Keep the first rows of the data for the table."""
        found, places = self._found, micro_batch.places
        for number, (prompt, answer, text) in enumerate(zip(prompts, expected, written, strict=True)):
            if answer is not None:
                place = (micro_batch.index, data_index(), number) if places is None else tuple(places[number])
                found.rows.append(_Row(place, self._decode(prompt), answer, text))
        found.rows = sorted(found.rows, key=lambda row: row.place)[: self._section.table_rows]


def _split(batch: Mapping[str, Any], *, is_encoder_decoder: bool) -> list[tuple[list[int], list[int] | None]]:
    """Return the prompt and the expected answer of each row; None as answer where it has none."""
    inputs, labels = batch["input_ids"].tolist(), batch["labels"].tolist()
    mask = batch.get("attention_mask")
    masks = [[1] * len(row) for row in inputs] if mask is None or mask.ndim != 2 else mask.tolist()
    pairs: list[tuple[list[int], list[int] | None]] = []
    for row, targets, kept in zip(inputs, labels, masks, strict=True):
        end = next((number for number in range(len(targets), 0, -1) if targets[number - 1] != IGNORED), 0)
        start = 0 if is_encoder_decoder else end
        while start > 0 and targets[start - 1] != IGNORED:
            start -= 1
        stop = len(row) if is_encoder_decoder else start
        prompt = [token for token, is_kept in zip(row[:stop], kept[:stop], strict=True) if is_kept]
        answer = [label for label in targets[start:end] if label != IGNORED]
        pairs.append((prompt, answer if prompt and answer else None))
    return pairs


def _check_options(run: EvaluationRun, options: Mapping[str, Any]) -> None:
    model = run.module.unwrapped_model
    can_generate = getattr(model, "can_generate", None) or getattr(
        getattr(model, "base_model", None), "can_generate", None
    )
    where = run.settings.hps.where("evaluation", "generate")
    if can_generate is None or not can_generate():
        do = "use AutoModelForCausalLM or AutoModelForSeq2SeqLM, or remove `evaluation.generate`"
        raise fail(
            HyperParameterError, where, got=f"a {type(model).__name__}", expected="a model that can generate", do=do
        )
    from transformers import GenerationConfig

    known = [name for name in vars(GenerationConfig.from_dict({})) if not name.startswith("_")]
    for name in options:
        if name not in known:
            meant = nearest(name, known)
            do = f"did you mean `{meant}`?" if meant else "see GenerationConfig of transformers"
            raise fail(HyperParameterError, where, got=f"`{name}`", expected="arguments of `generate`", do=do)
        if name in _SAMPLING and not options.get("do_sample"):
            do = f"write `do_sample: true`, or remove `{name}`"
            raise fail(
                HyperParameterError, where, got=f"`{name}` without `do_sample`", expected="a search that samples", do=do
            )
        value = options[name]
        if name in _COUNTS and value is not None and (type(value) is not int or value < 1):
            got, do = f"{name} = {describe_value(value)}", f"write `{name}: 4`"
            raise fail(HyperParameterError, where, got=got, expected="a whole number of at least 1", do=do)
    try:
        GenerationConfig.from_dict(dict(options)).validate()
    except (TypeError, ValueError) as error:
        do = f"write `{_EXAMPLES['generate']}`, or see GenerationConfig of transformers"
        raise fail(
            HyperParameterError, where, got=str(error), expected="valid arguments of `generate`", do=do
        ) from error
    if "max_length" in options and not getattr(model.config, "is_encoder_decoder", False):
        got = f"max_length: {options['max_length']}, which counts the longest prompt of a batch, too"
        do = "write `max_new_tokens: 64`"
        raise fail(HyperParameterError, where, got=got, expected="a limit that does not depend on the batch", do=do)
