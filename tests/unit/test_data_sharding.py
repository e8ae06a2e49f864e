from accmt.data import Shard
from accmt.data.samplers import Plan


def grid():
    return [(n, b, r) for n in range(1, 41) for b in range(1, 6) for r in range(1, 5)]


def plans(num_samples, batch_size, count):
    return [Plan(num_samples, batch_size, Shard(index, count)) for index in range(count)]


def samples_in(plan, first, last):
    return plan.samples_before(last) - plan.samples_before(first)


def test_every_position_belongs_to_one_process_and_round_in_the_order_of_the_whole():
    for num_samples, batch_size, count in grid():
        shares = plans(num_samples, batch_size, count)
        positions = [
            p
            for micro_batch in range(shares[0].num_micro_batches)
            for plan in shares
            for p in plan.local_indices(micro_batch)
        ]
        assert positions == list(range(num_samples)), (num_samples, batch_size, count)


def test_the_parts_of_a_round_are_as_even_as_can_be_and_no_larger_than_a_batch():
    for num_samples, batch_size, count in grid():
        shares = plans(num_samples, batch_size, count)
        for micro_batch in range(shares[0].num_micro_batches):
            sizes = [len(plan.local_indices(micro_batch)) for plan in shares]
            assert max(sizes) - min(sizes) <= 1
            assert max(sizes) <= batch_size
            assert sizes == sorted(sizes, reverse=True)
            assert sum(sizes) == samples_in(shares[0], micro_batch, micro_batch + 1)


def test_five_samples_for_two_processes_by_hand():
    first, second = plans(5, 2, 2)
    assert (first.global_batch_size, first.num_micro_batches) == (4, 2)
    assert [list(first.local_indices(0)), list(second.local_indices(0))] == [[0, 1], [2, 3]]
    assert [list(first.local_indices(1)), list(second.local_indices(1))] == [[4], []]


def test_a_plan_that_goes_on_counts_rounds_on_and_cuts_what_is_left():
    for num_samples, batch_size, count in grid():
        for passed in range(0, num_samples + 1, 3):
            shares = [
                Plan(num_samples, batch_size, Shard(i, count), first_micro_batch=7, first_sample=passed)
                for i in range(count)
            ]
            plan = shares[0]
            micro_batches = range(7, plan.num_micro_batches)
            assert len(micro_batches) == -(-(num_samples - passed) // (batch_size * count))
            assert [p for r in micro_batches for own in shares for p in own.local_indices(r)] == list(
                range(passed, num_samples)
            )
            assert samples_in(plan, 7, plan.num_micro_batches) == num_samples - passed
            assert [plan.samples_before(r) for r in (7, plan.num_micro_batches, plan.num_micro_batches + 5)] == [
                passed,
                num_samples,
                num_samples,
            ]
