"""The examples, run as a user runs them."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from accmt import read_history
from accmt.saving import read_status
from tests.launching import run_script, torchrun

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
DIGITS = EXAMPLES / "digits.py"
CLASSIFIER = EXAMPLES / "finetune_text_classifier.py"


def run_example(name: str, *arguments: str) -> str:
    """Run an example in the current folder, and return what it printed."""
    run = run_script(EXAMPLES / f"{name}.py", *arguments, timeout_s=240)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def read_number(pattern: str, printed: str) -> float:
    """Return the number in the place of the pattern's group."""
    found = re.search(pattern, printed)
    assert found, printed
    return float(found[1].replace(",", ""))


@pytest.fixture
def import_example(monkeypatch: pytest.MonkeyPatch):
    """Give a function that imports an example by its name."""

    def load(name: str) -> ModuleType:
        monkeypatch.syspath_prepend(EXAMPLES)
        before = set(sys.modules)
        module = import_module(name)
        for path in EXAMPLES.glob("*.py"):
            if path.stem not in before:
                monkeypatch.delitem(sys.modules, path.stem, raising=False)
        return module

    return load


def accelerate_launch(*arguments: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    """Run a script with `accelerate launch` on one process."""
    launcher = Path(sys.executable).parent / "accelerate"
    flags = ["--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command = [str(launcher), "launch", *flags, "--num_cpu_threads_per_process", "1", *arguments]
    return subprocess.run(command, env={**os.environ}, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.mark.slow
@pytest.mark.repeats
def test_the_digits_have_equal_weights_under_accelerate_launch_and_run_on_two_processes(tmp_path: Path):
    launched = accelerate_launch(str(DIGITS), "--output", str(tmp_path / "launched"), "--seed", "3")
    assert launched.returncode == 0, launched.stderr
    alone = run_script(DIGITS, "--output", tmp_path / "alone", "--seed", "3")
    assert alone.returncode == 0, alone.stderr
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("launched", "alone"))
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)
    printed = torchrun(DIGITS, "--output", str(tmp_path / "two"), processes=2)
    for text in (launched.stdout, printed):
        accuracy = float(text.split("best accuracy")[1].split("%")[0])
        assert accuracy > 85
    assert printed.count("best accuracy") == 1


@pytest.mark.slow
def test_the_text_classifier_ends_with_a_folder_that_transformers_loads(tmp_path: Path):
    run = accelerate_launch(str(CLASSIFIER), "--output", str(tmp_path / "model"), "--limit", "12")
    assert run.returncode == 0, run.stderr
    for text in ("test accuracy", "best epoch", "model folder", "mlflow"):
        assert text in run.stdout
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert sorted(model.config.label2id) == ["business", "entertainment", "politics", "sports", "tech"]
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("a goal")["input_ids"]
    folder = next((tmp_path / "logs" / "model").iterdir())
    assert [row["status"] for row in read_history(folder) if "status" in row] == ["FINISHED"]
    assert (tmp_path / "logs" / "mlflow.db").exists()


def test_a_narrowed_tokenizer_has_the_same_ids_each_time(import_example):
    """Processes that make one each have to agree; one that is trained numbers its tokens by chance."""
    example = import_example("language_model")
    texts = ["a late win for the home side", "shares of the bank fell late", "the home of the bank"]
    first, second = (example.narrow_tokenizer(texts, 145) for _ in range(2))
    assert len(first) == 145
    assert first.get_vocab() == second.get_vocab()
    assert first("the late home")["input_ids"][0] == first.cls_token_id
    for text in ("the late home", "shares of the side"):  # of letters, where a word is left out
        assert first.decode(first(text)["input_ids"], skip_special_tokens=True) == text


@pytest.mark.slow
def test_the_perplexity_of_the_language_model_is_that_of_its_target_tokens(tmp_path: Path, import_example):
    printed = run_example("language_model", "--output", "model", "--limit", "24")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    example = import_example("language_model")
    tokenizer, model = AutoTokenizer.from_pretrained("model"), AutoModelForCausalLM.from_pretrained("model").eval()
    samples = example.tokenize(example.read_articles()[:24], tokenizer)
    assert len({len(sample["input_ids"]) for sample in samples}) > 10, "the samples are ragged"
    losses = []
    for sample in samples:  # one at a time: no padding, no batches, no weights
        ids, labels = (torch.tensor([sample[name]]) for name in ("input_ids", "labels"))
        with torch.inference_mode():
            logits = model(input_ids=ids).logits
        is_target = labels[0, 1:] != -100
        losses += functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")[is_target].tolist()
    assert len(losses) < sum(len(sample["input_ids"]) - 1 for sample in samples), "topics are no targets"
    loss = read_status(Path("model"))["best"]["best_valid_loss"]
    assert loss == pytest.approx(math.fsum(losses) / len(losses), rel=1e-5)
    assert read_number(r"perplexity +([\d.]+)", printed) == pytest.approx(math.exp(loss), abs=0.06)
    for topic in ("business", "entertainment", "politics", "sports", "tech"):
        assert re.search(rf"^  {topic} ?:.+", printed, re.MULTILINE), printed


@pytest.mark.slow
def test_the_perplexity_of_the_sharded_model_is_that_of_the_saved_whole_one(tmp_path: Path, import_example):
    printed = torchrun(EXAMPLES / "finetune_sharded.py", "--output", "model", "--limit", "10", processes=2)
    assert "processes     2" in printed
    example = import_example("finetune_sharded")
    tokenizer = example.AutoTokenizer.from_pretrained("model")
    model = example.AutoModelForCausalLM.from_pretrained("model").eval()
    total = count = 0.0
    for sample in example.tokenize(example.read_articles()[:10], tokenizer):
        ids, labels = (torch.tensor([sample[name]]) for name in ("input_ids", "labels"))
        with torch.inference_mode():
            targets = int((labels[:, 1:] != -100).sum())
            total, count = total + targets * model(input_ids=ids, labels=labels).loss.item(), count + targets
    assert read_number(r"perplexity +([\d.]+)", printed) == pytest.approx(math.exp(total / count), rel=1e-3)


@pytest.mark.slow
def test_the_student_is_smaller_and_as_like_its_teacher_as_printed(tmp_path: Path, import_example):
    printed = run_example("distill_text_encoder", "--output", "student", "--limit", "12")
    example = import_example("distill_text_encoder")
    student = example.AutoModel.from_pretrained("student").eval()
    teacher = example.AutoModel.from_pretrained(example.MODEL_DIR).eval()
    assert student.config.num_hidden_layers < teacher.config.num_hidden_layers
    for name, model in (("student", student), ("teacher", teacher)):
        parameters = read_number(rf"{name} +([\d.]+) M parameters", printed)
        assert parameters == pytest.approx(model.num_parameters() / 1e6, abs=0.05)
    tokenizer = example.AutoTokenizer.from_pretrained("student")
    texts = [text for text, _ in example.read_articles()[425:437]]
    batch = tokenizer(texts, truncation=True, max_length=example.MAX_TOKENS, padding=True, return_tensors="pt")
    with torch.inference_mode():
        embeddings = [example.embed(model, batch) for model in (student, teacher)]
    similarity = functional.cosine_similarity(*embeddings).mean().item()
    assert read_number(r"a similarity of ([\d.]+)", printed) == pytest.approx(similarity, abs=1e-3)


@pytest.mark.slow
def test_the_bag_of_words_is_validated_on_each_set_and_saved_by_one(tmp_path: Path):
    printed = run_example("several_validation_sets", "--output", "model", "--limit", "40")
    status = read_status(Path("model"))
    rows = [row.get("values", {}) for row in read_history(next(Path("logs/model").iterdir()))]
    accuracies = [row["accuracy__words_10"] for row in rows if "accuracy__words_10" in row]
    assert len(accuracies) == 8
    assert status["best"]["best_accuracy@words_10"] == max(accuracies)
    assert accuracies.index(max(accuracies)) + 1 == status["evaluations_done"]
    for length in (10, 50, 400):
        names = (f"{metric}__words_{length}" for metric in ("accuracy", "f1", "val_loss"))
        accuracy, f1, loss = (status["metrics"][name] for name in names)
        assert re.search(rf"{length} words +{accuracy:.1%} +{f1:.3f} +{loss:.3f}\n", printed), printed


@pytest.mark.slow
def test_lora_trains_and_saves_the_adapter_alone(tmp_path: Path):
    printed = run_example("finetune_with_lora", "--output", "adapter", "--limit", "24")
    assert not Path("adapter/config.json").exists()
    weights = load_file("adapter/adapter_model.safetensors")
    assert {"lora_A" in name or "lora_B" in name or "classifier" in name for name in weights} == {True}
    assert all(tensor.abs().sum() > 0 for name, tensor in weights.items() if "lora_B" in name), "they begin as zero"
    trained = read_number(r"trained +([\d,]+) of", printed)
    assert trained == sum(tensor.numel() for tensor in weights.values())
    assert read_number(r"test accuracy +([\d.]+)% of 24", printed) >= 0


@pytest.mark.slow
def test_both_networks_of_the_gan_are_trained_and_scored_as_printed(tmp_path: Path, import_example):
    printed = run_example("gan", "--output", "model", "--limit", "64")
    example = import_example("gan")
    example.set_seed(example.SEED)
    before, after = example.GAN().model.state_dict(), load_file("model/model.safetensors")
    changed = {name.split(".")[0] for name, weights in before.items() if not weights.equal(after[name])}
    assert changed == {"generator", "discriminator"}
    status = read_status(Path("model"))
    best = status["best"]["best_digit_score"]
    assert read_number(r"digit score +([\d.]+);", printed) == pytest.approx(best, abs=0.006)
    saved_at = {int(folder.name) for folder in Path("logs/model").glob("*/media/generated/*")}
    assert status["global_step"] == max(saved_at), "each generator that was saved has its images"
    assert Path("model/generated.png").stat().st_size > 1000


def test_the_digit_score_is_near_ten_for_ten_clear_digits_and_one_for_one_image(import_example):
    example = import_example("gan")
    train, _ = example.build_datasets()
    digit_score, (images, labels) = example.DigitScore(*train.tensors), train.tensors
    sure = digit_score.judge.predict_proba(images.flatten(1).numpy()).max(1) > 0.98
    same_often = torch.cat([images[sure & (labels == digit).numpy()][:5] for digit in range(10)])
    assert len(same_often) == 50
    assert 9 < digit_score.compute(same_often, None)["digit_score"] < 10
    assert digit_score.compute(images[:1].repeat(50, 1, 1, 1), None)["digit_score"] == pytest.approx(1)


@pytest.mark.slow
def test_the_residual_network_is_as_accurate_as_printed(tmp_path: Path, import_example):
    printed = run_example("vision", "--output", "model", "--limit", "64")
    example = import_example("vision")
    model = example.ResNet().model.eval()
    model.load_state_dict(load_file("model/model.safetensors"))
    images, labels = example.build_datasets(64)[1][:]
    with torch.inference_mode():
        accuracy = (model(images).argmax(-1) == labels).float().mean().item()
    assert read_number(r"best accuracy +([\d.]+)% of 64", printed) == pytest.approx(100 * accuracy, abs=0.06)
    assert read_status(Path("model"))["best"]["best_accuracy"] == pytest.approx(accuracy)


def test_images_are_augmented_anew_and_mixed_with_their_labels(import_example):
    example = import_example("vision")
    train, _ = example.build_datasets(16)
    augmented = example.Augmented(train)
    assert augmented[0][0].shape == train[0][0].shape
    assert not augmented[0][0].equal(augmented[0][0])
    example.set_seed(1)
    images, targets = example.mixup([train[index] for index in range(16)])
    originals, labels = train[:]
    weights = torch.linalg.lstsq(originals.flatten(1).T, images.flatten(1).T).solution.T  # [images, originals]
    assert ((weights > 0.01).sum(1) == 2).sum() >= 8, "most are made of two"
    assert weights.clip(0).matmul(functional.one_hot(labels, 10).float()).sub(targets).abs().max() < 1e-3


@pytest.mark.slow
def test_the_articles_of_headlines_are_found_as_often_as_printed(tmp_path: Path, import_example):
    printed = run_example("retrieval", "--output", "model", "--limit", "24")
    example = import_example("retrieval")
    tokenizer = example.AutoTokenizer.from_pretrained("model")
    model = example.AutoModel.from_pretrained("model").eval()
    pairs = example.tokenize(example.read_pairs()[:24], tokenizer)
    assert model.config.num_hidden_layers == example.LAYERS
    with torch.inference_mode():  # one at a time: no padding
        embed = lambda side: example.embed(model, tokenizer.pad([side], return_tensors="pt"))[0]  # noqa: E731
        headlines, articles = (torch.stack([embed(side) for side in sides]) for sides in zip(*pairs, strict=True))
    ranks = [(row > row[own]).sum().item() for own, row in enumerate(headlines @ articles.T)]
    for name, most in (("first", 1), ("five", 5)):
        found = 100 * sum(rank < most for rank in ranks) / 24
        assert read_number(rf"after .*{name} ([\d.]+)%", printed) == pytest.approx(found, abs=0.06)


@pytest.mark.slow
def test_the_answers_of_the_fine_tuned_model_are_as_right_as_printed(tmp_path: Path, import_example):
    run = run_script(EXAMPLES / "sft.py", "--output", "model", "--limit", "24", timeout_s=240)
    assert run.returncode == 0, run.stderr
    assert re.search(r"assistant :⟦it is about \w+\. \[SEP\]⟧", run.stderr), run.stderr
    example = import_example("sft")
    tokenizer = example.AutoTokenizer.from_pretrained("model")
    model = example.AutoModelForCausalLM.from_pretrained("model").eval()
    assert tokenizer.chat_template == example.TEMPLATE
    articles = example.read_articles()[:24]
    right = sum(topic in example.answer(text, tokenizer, model) for text, topic in articles)
    assert read_number(r"right answers +([\d.]+)% of 24", run.stdout) == pytest.approx(100 * right / 24, abs=0.06)


@pytest.mark.slow
def test_the_tuned_model_prefers_the_chosen_answers_as_often_as_printed(tmp_path: Path, import_example):
    printed = run_example("prefer", "--output", "model", "--limit", "24")
    example = import_example("prefer")
    tokenizer = example.AutoTokenizer.from_pretrained("model")
    model = example.AutoModelForCausalLM.from_pretrained("model").eval()

    def mean_log_prob(row: dict[str, Any], name: str) -> float:
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        answer = f"{row[name][0]['content']} [SEP]"
        before, ids = (tokenizer(text, add_special_tokens=False).input_ids for text in (prompt, prompt + answer))
        with torch.inference_mode():
            logs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return sum(float(logs[at - 1, ids[at]]) for at in range(len(before), len(ids))) / (len(ids) - len(before))

    rows = example.make_pairs(example.read_articles()[:24])
    preferred = sum(mean_log_prob(row, "chosen") > mean_log_prob(row, "rejected") for row in rows)
    assert read_number(r"preferred: ([\d.]+)%", printed) == pytest.approx(100 * preferred / 24, abs=0.06)
    assert len(re.findall(r"before '.*', after '", printed)) == 3


@pytest.mark.slow
def test_the_capitals_that_were_taken_away_are_found_as_often_as_printed(tmp_path: Path, import_example):
    printed = run_example("token_classification", "--output", "model", "--limit", "24")
    from sklearn.metrics import f1_score
    from transformers import pipeline

    example = import_example("token_classification")
    tokenizer = example.AutoTokenizer.from_pretrained("model")
    model = example.AutoModelForTokenClassification.from_pretrained("model").eval()
    predicted, expected = [], []
    for _, article in example.read_pairs()[:24]:  # one at a time: no padding
        sample = example.tokenize(*example.take_capitals_away(article), tokenizer)
        with torch.inference_mode():
            logits = model(torch.tensor([sample["input_ids"]])).logits[0]
        kept = [(label, row.argmax().item()) for label, row in zip(sample["labels"], logits, strict=True) if label >= 0]
        expected += [label for label, _ in kept]
        predicted += [label for _, label in kept]
    for label, name in enumerate(example.LABELS):
        f1 = f1_score(expected, predicted, labels=[label], average=None, zero_division=0)[0]
        count = expected.count(label)
        assert count > 20
        assert re.search(rf"^{name} +F1 {f1:.3f} of {count} words$", printed, re.MULTILINE), printed
    named = pipeline("token-classification", model="model", ignore_labels=[])("profits fell but the bank is strong")
    assert len(named) == 7
    assert {found["entity"] for found in named} <= set(example.LABELS)


def test_cases_become_labels_of_first_tokens_and_are_written_back(import_example):
    example = import_example("token_classification")
    text = (
        'Profits at "TimeWarner" jumped 76%, to $1.13bn (£600m); "Why not?" I asked a year-earlier BBC spokesman - Jo.'
    )
    words, labels = example.take_capitals_away(text)
    assert " ".join(words) == (
        "profits at timewarner jumped 76% to $1.13bn £600m why not i asked a year-earlier bbc spokesman jo"
    )
    cases = {word: list(example.LABELS)[label] for word, label in zip(words, labels, strict=True)}
    titles = dict.fromkeys(["profits", "timewarner", "why", "i", "jo"], "TITLE")
    assert cases == dict.fromkeys(words, "O") | titles | {"bbc": "UPPER"}
    tokenizer = example.AutoTokenizer.from_pretrained(example.MODEL_DIR)
    sample = example.tokenize(words, labels, tokenizer)
    assert len(sample["labels"]) == len(sample["input_ids"]) > len(words) + 2, "a word may have several tokens"
    assert [label for label in sample["labels"] if label >= 0] == labels

    def knows_them(ids: torch.Tensor) -> SimpleNamespace:
        assert ids.tolist() == [sample["input_ids"]]
        return SimpleNamespace(logits=functional.one_hot(torch.tensor([sample["labels"]]).clip(0), 3))

    assert example.write_capitals(words, tokenizer, knows_them) == (
        "Profits at Timewarner jumped 76% to $1.13bn £600m Why not I asked a year-earlier BBC spokesman Jo"
    )


@pytest.mark.slow
def test_the_curriculum_is_as_accurate_on_short_texts_as_printed(tmp_path: Path, import_example):
    printed = run_example("curriculum", "--output", "model", "--limit", "24")
    example = import_example("curriculum")
    articles = example.read_articles()
    topics = sorted({topic for _, topic in articles})
    tokenizer = example.AutoTokenizer.from_pretrained(example.MODEL_DIR)
    model = example.BagOfWords(len(tokenizer), len(topics)).model.eval()
    model.load_state_dict(load_file("model/model.safetensors"))
    words, expected = example.collate(example.build_samples(articles[:24], tokenizer, topics, 10))
    with torch.inference_mode():
        accuracy = (model(words).argmax(-1) == expected).float().mean().item()
    assert read_number(r"accuracy +([\d.]+)% of 24", printed) == pytest.approx(100 * accuracy, abs=0.06)
    rows = [row for row in read_history(next(Path("logs/model").glob("*"))) if "accuracy" in row.get("values", {})]
    assert [row["step"] for row in rows] == list(range(30, 361, 30)), "four evaluations in each of three stages"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_guarded_and_takes_a_folder_and_a_limit(path: Path):
    text = path.read_text(encoding="utf-8")
    for line in ('if __name__ == "__main__":', 'parser.add_argument("--output"', 'parser.add_argument("--limit"'):
        assert line in text


def test_every_file_of_hyper_parameters_loads():
    from accmt import HyperParameters

    files = sorted((ROOT / "hps").glob("*.yaml"))
    assert files
    for file in files:
        hps = HyperParameters.from_config(file)
        assert HyperParameters.from_config(hps.to_dict()) == hps


@pytest.mark.slow
def test_the_topics_of_the_mixture_have_the_shares_that_the_file_says(tmp_path: Path):
    printed = run_example("mix", "--limit", "24", "--output", str(tmp_path / "model"))
    shares = {"sports": 50, "business": 30, "politics": 20}
    for topic, share in shares.items():
        assert read_number(rf"{topic} +([\d.]+)% of the target tokens", printed) == pytest.approx(share, abs=3)
        assert read_number(rf"{topic} .* perplexity ([\d.]+)", printed) > 1
    assert (tmp_path / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_weights_have_the_same_digest_on_one_process_and_when_two_resume_it(tmp_path: Path):
    digest = r"weights at step 12: (\w{32})\n"
    alone = re.search(digest, run_example("same_bits", "--limit", "96", "--until", "12", "--output", "alone"))
    run_example("same_bits", "--limit", "96", "--until", "5", "--output", "resumed")
    arguments = ["--limit", "96", "--until", "12", "--output", "resumed"]
    printed = torchrun(EXAMPLES / "same_bits.py", *arguments, processes=2)
    assert "continuing from" in printed
    resumed = re.search(digest, printed)
    assert alone is not None
    assert resumed is not None
    assert alone[1] == resumed[1]


@pytest.mark.slow
def test_a_fine_tuned_model_continues_with_dpo_and_becomes_a_reward_model(tmp_path: Path, import_example):
    printed = run_example("dpo", "--base", "sft", "--output", "dpo", "--limit", "12")
    assert read_number(r"right answers: [\d.]+% before, ([\d.]+)% after", printed) >= 0
    printed = run_example("reward_model", "--base", "sft", "--output", "reward", "--limit", "12")
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    example = import_example("reward_model")
    tokenizer = AutoTokenizer.from_pretrained("reward")
    model = AutoModelForSequenceClassification.from_pretrained("reward").eval()
    assert model.config.num_labels == 1
    row = import_example("prefer").make_pairs(example.read_articles()[:12])[0]
    value = example.reward(row["prompt"] + row["chosen"], tokenizer, model)
    assert read_number(r"chosen +reward ([+-][\d.]+)", printed) == pytest.approx(value, abs=0.01)
