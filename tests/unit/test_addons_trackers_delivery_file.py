import json

from accmt.addons.trackers.delivery_state import DELIVERY_FILE, Account, DeliveryFile


def test_a_later_process_reads_what_was_written(tmp_path):
    delivery_file = DeliveryFile(tmp_path, "track", "run")
    delivery_file.attempt = 3
    delivery_file.accounts["mlflow"] = Account(
        server="http://host", kwargs={"tags": {"a": "b"}}, run_id="1f", delivered=5, names={"a@": "a_at_"}
    )
    delivery_file.save()
    read = DeliveryFile.read(tmp_path)
    assert (read.track_name, read.run_name, read.attempt) == ("track", "run", 3)
    assert read.accounts == delivery_file.accounts


def test_no_file_and_a_damaged_one_are_no_delivery_file(tmp_path):
    assert DeliveryFile.read(tmp_path) is None
    DeliveryFile(tmp_path, "track", "run").save()
    path = tmp_path / DELIVERY_FILE
    whole = path.read_text()
    for damaged in ("", whole[:20], "[]", json.dumps({"track_name": "track"})):
        path.write_text(damaged)
        assert DeliveryFile.read(tmp_path) is None
    path.write_text(whole)
    assert DeliveryFile.read(tmp_path) is not None


def test_a_new_run_of_a_tracker_gets_everything_from_its_first_line_on():
    account = Account(first=3, delivered=9, handed=12, status="FAILED", names={"a": "a"})
    account.restart()
    assert account == Account(first=3, delivered=3, handed=3, settled=3, names={"a": "a"})


def test_what_a_killed_process_handed_over_counts_once_it_has_settled():
    killed = Account(delivered=9, handed=12, settled=4)
    killed.reopen()
    assert killed == Account(delivered=4, handed=12, settled=4)
    ended = Account(delivered=9, handed=12, settled=4, status="FAILED")
    ended.reopen()
    assert ended.delivered == 9
