import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from accmt import AcceleratorModule
from accmt.data import DataCollatorForLongestSequence, build_collate
from accmt.data.collate import collate_or_explain, stack_tuples
from accmt.errors import ArgumentError, DataError
from tests.raising import raises_at
from tests.tables import each
from tests.toys import make_trainer


def double(batch):
    return batch * 2


def add_one(batch):
    return batch + 1


@pytest.mark.parametrize("kind", [list, tuple])
def test_several_functions_are_applied_one_after_the_other(kind):
    collate = build_collate(kind([default_collate, double, add_one]))
    assert torch.equal(collate([1, 2, 3]), torch.tensor([3, 5, 7]))


@each("value", ["pad", 3, [], (), [double, 3], [double, None]])
def test_what_cannot_be_called_is_rejected_by_the_name_of_its_argument(value):
    with raises_at(ArgumentError, "Trainer(collate_fn=...)"):
        build_collate(value)


@pytest.mark.parametrize("lacks", [0, 1])
def test_a_key_that_the_first_sample_of_a_batch_lacks_is_named(lacks, caplog):
    rows = [{"x": torch.ones(3), "y": torch.ones(1)} | ({} if i == lacks else {"w": torch.ones(1)}) for i in range(2)]
    if lacks:
        with pytest.raises(KeyError, match="w"):
            collate_or_explain(rows)
        return
    for _ in range(2):
        assert collate_or_explain(rows).keys() == {"x", "y"}
    assert caplog.text.count("the first sample of a batch has no w") == 1


def make_tokenizer(side="right"):
    """A tokenizer of the numbers 0 to 9 as words; 0 pads."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({**{str(n): n for n in range(10)}, "[MASK]": 10}, unk_token="9"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = {"pad_token": "0", "unk_token": "9", "mask_token": "[MASK]"}
    return PreTrainedTokenizerFast(tokenizer_object=words, padding_side=side, **tokens)


@pytest.mark.parametrize(("side", "ids"), [("right", [[1, 2, 3], [4, 0, 0]]), ("left", [[1, 2, 3], [0, 0, 4]])])
def test_inputs_are_padded_to_the_longest_on_the_side_of_the_tokenizer_and_targets_are_stacked(side, ids):
    collate = DataCollatorForLongestSequence(make_tokenizer(side))
    inputs, targets = collate([([1, 2, 3], 0.5), ({"input_ids": [4]}, 1.5)])
    assert inputs["input_ids"].tolist() == ids
    assert torch.equal(inputs["attention_mask"], (inputs["input_ids"] != 0).long())
    assert torch.equal(targets, torch.tensor([0.5, 1.5], dtype=torch.float64))


def test_inputs_alone_need_no_targets_and_targets_can_stay_a_list():
    tokenizer = make_tokenizer()
    alone = DataCollatorForLongestSequence(tokenizer)([tokenizer("1 2"), tokenizer("3")])
    assert alone["input_ids"].tolist() == [[1, 2], [3, 0]]
    _, targets = DataCollatorForLongestSequence(tokenizer, torch_stack=False)([([1], [1, 2]), ([2], [3])])
    assert targets == [[1, 2], [3]]


class Recorder(AcceleratorModule):
    """Writes down what it is trained on."""

    def __init__(self):
        self.model = nn.Embedding(11, 1)
        self.seen = []

    def training_step(self, batch):
        inputs = batch[0] if isinstance(batch, list | tuple) else batch
        self.seen.append({name: tensor.tolist() for name, tensor in inputs.items()})
        return self.model(inputs["input_ids"]).mean()


def train(samples, collate, **settings):
    module = Recorder()
    trainer = make_trainer({"epochs": 2, "batch_size": 3}, collate_fn=collate, shuffle_train=False, **settings)
    trainer.fit(module, samples)
    return module.seen


def test_ragged_pairs_train():
    samples = [(list(range(1, 2 + index)), index) for index in range(6)]
    seen = train(samples, DataCollatorForLongestSequence(make_tokenizer()), num_sanity_val_steps=0)
    assert [len(batch["input_ids"][0]) for batch in seen] == [3, 6, 3, 6]


def test_the_tokens_that_transformers_masks_follow_from_seed_and_epoch_whatever_the_workers():
    from transformers import DataCollatorForLanguageModeling

    samples = [{"input_ids": [index % 9 + 1] * 40} for index in range(6)]
    collate = DataCollatorForLanguageModeling(make_tokenizer(), mlm=True, mlm_probability=0.15)
    first, again, other = (train(samples, collate, seed=seed) for seed in (1, 1, 2))
    assert first == again == train(samples, collate, seed=1, dataloader_num_workers=1)
    assert first != other
    assert first[:2] != first[2:], "each epoch masks other tokens"
    seeded = DataCollatorForLanguageModeling(make_tokenizer(), mlm=True, mlm_probability=0.15, seed=3)
    assert train(samples, seeded, seed=1) == train(samples, seeded, seed=1, dataloader_num_workers=1)
    assert seeded.generator is not None
    masked = sum(label != -100 for batch in first for row in batch["labels"] for label in row)
    assert 0.08 < masked / (2 * 6 * 40) < 0.22


def test_plain_tuples_are_stacked_as_torch_does_and_everything_else_is_left_to_it():
    plain = [(torch.randn(3), torch.tensor(index)) for index in range(5)]
    for own, of_torch in zip(stack_tuples(plain), default_collate(plain), strict=True):
        assert torch.equal(own, of_torch)
    unequal = [(torch.ones(1),), (torch.ones(1), torch.ones(1))]
    for samples in ([], [(1, 2)], [torch.ones(2)], [[torch.ones(2)]], unequal, [(torch.ones(2).to_sparse(),)]):
        assert stack_tuples(samples) is None


@pytest.mark.parametrize(
    ("labels", "collator"),
    [
        ([1, 0], "DataCollatorWithPadding"),
        ([[4, 5], [4, 5, 6]], "DataCollatorForSeq2Seq"),
        ([torch.ones(2), torch.ones(3)], "DataCollatorForSeq2Seq"),
    ],
)
def test_rows_of_unequal_lengths_are_told_the_collator_that_pads_their_labels(labels, collator):
    rows = [{"input_ids": ids, "labels": own} for ids, own in zip([[1, 2], [1, 2, 3]], labels, strict=True)]
    with raises_at(DataError, "making a batch", do=f"Trainer(collate_fn={collator}(tokenizer))"):
        collate_or_explain(rows)
