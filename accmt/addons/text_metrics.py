"""Metrics of texts that a model writes: computed by the libraries that papers use."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

from accmt.errors import MetricError, MissingPackageError, fail
from accmt.metrics.metric import IsBetter, Metric
from accmt.metrics.results import TooFewSamplesError, describe, find_scalar, metric_error


class TextMetric(Metric):
    """A metric of written texts and expected ones.

    `validation_step` returns `{"<name>": (written, expected)}`, two lists of strings; with `generate` in the section
    `evaluation` of the hyper-parameters, the model writes them. Samples whose expected text is None, such as rows
    without an answer, are left out.
    """

    def how_to_return(self) -> str:
        """Return what to write if `validation_step` returns no texts for it."""
        do = "write `evaluation: {generate: {max_new_tokens: 64}}` in the hyper-parameters, or return "
        return f'{do}{{"{self.name}": (written, expected)}} from validation_step'

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        """Compute the metric over the samples that have an expected text."""
        if len(predictions) != len(references):
            got = f"{len(predictions)} written and {len(references)} expected texts"
            do = "return two lists with one entry for each sample of the batch; None as expected text leaves one out"
            raise metric_error(self.name, got, "as many of both", do)
        pairs = [(one, other) for one, other in zip(predictions, references, strict=True) if other is not None]
        if not pairs:
            got, expected = (
                f"{len(predictions)} samples without an expected text",
                "at least one with a prompt and an answer",
            )
            do = f"add such rows to the validation set, or leave {self.name!r} out for this set: metrics={{set: [...]}}"
            raise fail(TooFewSamplesError, f"metric {self.name!r}", got=got, expected=expected, do=do)
        wrong = next((value for pair in pairs for value in pair if not isinstance(value, str)), None)
        if wrong is not None:
            do = f"return {{{self.name!r}: (written, expected)}} from validation_step, two lists of strings"
            raise metric_error(self.name, describe(wrong), "strings", do)
        return self.compare([one for one, _ in pairs], [other for _, other in pairs])

    def compare(self, written: Sequence[str], expected: Sequence[str]) -> dict[str, float]:
        """Return the values over all samples.

        Args:
            written: What the model wrote for each sample.
            expected: What it should have written.
        """
        raise NotImplementedError

    def score(self, written: str, expected: str) -> float | None:
        """Return the value of one sample, for the table of generated texts; None if it has no meaning alone."""
        return None


class ExactMatch(TextMetric):
    """The fraction of texts that equal the expected ones, without white space around them.

    Args:
        name: The key under which `validation_step` returns written and expected texts.
    """

    def __init__(self, name: str = "exact_match") -> None:
        super().__init__(name, greater_is_better=True)

    def compare(self, written: Sequence[str], expected: Sequence[str]) -> dict[str, float]:
        """Return the fraction."""
        return {self.name: sum(map(self.score, written, expected)) / len(written)}

    def score(self, written: str, expected: str) -> float:
        """Return 1.0 if they are equal, else 0.0."""
        return float(written.strip() == expected.strip())


class Rouge(TextMetric):
    """ROUGE by `rouge-score`, the F-measure averaged over samples: ROUGE-L, and `<name>1` and `<name>2`.

    Args:
        name: The key under which `validation_step` returns written and expected texts; also the name of ROUGE-L.
        use_stemmer: Whether words are reduced to their stems (English only).

    Source:
        Lin, 2004: https://aclanthology.org/W04-1013
    """

    def __init__(self, name: str = "rouge", *, use_stemmer: bool = False) -> None:
        super().__init__(name, greater_is_better=True)
        self._use_stemmer = use_stemmer
        self._scorer: Any = None

    @property
    def directions(self) -> Mapping[str, IsBetter]:
        """Each of the three can select a model."""
        return dict.fromkeys((self.name, f"{self.name}1", f"{self.name}2"), self.is_better)

    def compare(self, written: Sequence[str], expected: Sequence[str]) -> dict[str, float]:
        """Return the three means."""
        scores = [self._score(one, other) for one, other in zip(written, expected, strict=True)]
        kinds = {self.name: "rougeL", f"{self.name}1": "rouge1", f"{self.name}2": "rouge2"}
        return {name: sum(score[kind].fmeasure for score in scores) / len(scores) for name, kind in kinds.items()}

    def score(self, written: str, expected: str) -> float:
        """Return ROUGE-L."""
        return float(self._score(written, expected)["rougeL"].fmeasure)

    def _score(self, written: str, expected: str) -> Any:
        if self._scorer is None:
            kinds = ["rouge1", "rouge2", "rougeL"]
            self._scorer = _load("rouge_score.rouge_scorer").RougeScorer(kinds, use_stemmer=self._use_stemmer)
        return self._scorer.score(expected, written)


class SacreBLEU(TextMetric):
    """BLEU over the whole set, from 0 to 100, by `sacrebleu`.

    Args:
        name: The key under which `validation_step` returns written and expected texts.
        **arguments: For `sacrebleu.corpus_bleu`, such as `tokenize="zh"`.

    Source:
        Post, 2018: https://aclanthology.org/W18-6319
    """

    def __init__(self, name: str = "sacrebleu", **arguments: Any) -> None:
        super().__init__(name, greater_is_better=True)
        self._arguments = arguments

    def compare(self, written: Sequence[str], expected: Sequence[str]) -> dict[str, float]:
        """Return the score."""
        found = _load("sacrebleu").corpus_bleu(list(written), [list(expected)], **self._arguments)
        return {self.name: float(found.score)}


class ChrF(TextMetric):
    """chrF over the whole set, from 0 to 100, by `sacrebleu`.

    Args:
        name: The key under which `validation_step` returns written and expected texts.
        **arguments: For `sacrebleu.corpus_chrf`, such as `word_order=2` for chrF++.

    Source:
        Popović, 2015: https://aclanthology.org/W15-3049
    """

    def __init__(self, name: str = "chrf", **arguments: Any) -> None:
        super().__init__(name, greater_is_better=True)
        self._arguments = arguments

    def compare(self, written: Sequence[str], expected: Sequence[str]) -> dict[str, float]:
        """Return the score."""
        found = _load("sacrebleu").corpus_chrf(list(written), [list(expected)], **self._arguments)
        return {self.name: float(found.score)}


class WER(TextMetric):
    """The word error rate over the whole set, by `jiwer`: edits divided by the number of expected words.

    Args:
        name: The key under which `validation_step` returns written and expected texts.
    """

    _function = "wer"

    def __init__(self, name: str = "wer") -> None:
        super().__init__(name, greater_is_better=False)

    def compare(self, written: Sequence[str], expected: Sequence[str]) -> dict[str, float]:
        """Return the rate."""
        empty = next((number for number, text in enumerate(expected) if not text.strip()), None)
        if empty is not None:
            got = f"an empty expected text (the {empty + 1}. of {len(expected)})"
            raise metric_error(self.name, got, "texts with words", "remove such rows from the validation data")
        return {self.name: float(getattr(_load("jiwer"), self._function)(list(expected), list(written)))}

    def score(self, written: str, expected: str) -> float:
        """Return the rate of one sample."""
        return self.compare([written], [expected])[self.name]


class CER(WER):
    """The character error rate over the whole set, by `jiwer`: edits divided by the number of expected characters.

    Args:
        name: The key under which `validation_step` returns written and expected texts.
    """

    _function = "cer"

    def __init__(self, name: str = "cer") -> None:
        super().__init__(name)


class TextFunction(TextMetric):
    """A user's function of written and expected texts, named as `module:function`.

    Args:
        function: Receives two lists of strings, and returns a number, or numbers by name.
        name: The key under which `validation_step` returns the texts; also the name of a single number.
    """

    def __init__(self, function: Callable[[list[str], list[str]], Any], name: str) -> None:
        super().__init__(name, greater_is_better=True)
        self._function = function

    def compare(self, written: Sequence[str], expected: Sequence[str]) -> dict[str, float]:
        """Return what the function returns."""
        found = self._function(list(written), list(expected))
        number = find_scalar(found)
        return dict(found) if number is None and isinstance(found, Mapping) else {self.name: found}


def load_text_function(path: str, name: str | None) -> TextFunction:
    """Return the metric of a user's function of texts, "module:function"."""
    module, _, attribute = path.partition(":")
    here = str(Path.cwd())
    sys.path.append(here)  # which a command such as `accmt sft` does not do by itself
    try:
        function = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        do = f"write `def {attribute or 'score'}(written, expected)` in {module or 'my_metrics'}.py, in a folder that "
        do += "Python imports from, or the working directory"
        raise fail(
            MetricError,
            "Trainer(metrics=...)",
            got=f"{path!r}: {error}",
            expected="a module and a function in it",
            do=do,
        ) from error
    finally:
        sys.path.remove(here)
    try:
        signature(function).bind([], [])
    except TypeError as error:
        got, do = f"{path!r}: {error}", f"write `def {attribute}(written, expected)`"
        raise fail(
            MetricError, "Trainer(metrics=...)", got=got, expected="a function of two lists of strings", do=do
        ) from error
    except ValueError:  # a function in C has no signature
        pass
    return TextFunction(function, name or attribute)


def _load(name: str) -> Any:
    handlers = list(logging.root.handlers)
    try:
        return import_module(name)
    except ImportError as error:
        package = {"rouge_score.rouge_scorer": "rouge-score"}.get(name, name)
        do = "pip install 'accmt-trainer[texts]'"
        raise fail(
            MissingPackageError, "metrics of texts", got=str(error), expected=f"the package {package}", do=do
        ) from error
    finally:
        logging.root.handlers[:] = handlers  # absl, which rouge-score imports, adds one: each message would come twice
