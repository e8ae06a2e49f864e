from accmt.errors import HyperParameterError
from accmt.options.checks import KeyFault
from accmt.options.yaml_reader import Document
from tests.tables import each

LINES = {(): 1, ("epochs",): 2, ("optim",): 4, ("optim", "lr"): 6, ("optim", "betas", 1): 7}
DOCUMENT = Document("hps/x.yaml", {}, LINES)


def fault(*path, line=None):
    return KeyFault(path, "g", "e", "d", line)


@each(
    ("path", "place"),
    [
        ((), "hps/x.yaml:1"),
        (("epochs",), "hps/x.yaml:2 epochs"),
        (("optim", "lr"), "hps/x.yaml:6 optim.lr"),
        (("optim", "betas", 1), "hps/x.yaml:7 optim.betas.1"),
        (("optim", "eps"), "hps/x.yaml:4 optim.eps"),
        (("scheduler", "type"), "hps/x.yaml:1 scheduler.type"),
    ],
)
def test_a_place_is_file_line_and_key_or_that_of_the_nearest_parent(path, place):
    assert DOCUMENT.where(path) == place


def test_a_source_without_lines_names_itself_and_the_key():
    assert Document("hps_config", {}).where(("optim", "lr")) == "hps_config optim.lr"


def test_one_fault_is_one_message_of_four_parts():
    error = DOCUMENT.reject([fault("epochs")])
    assert isinstance(error, HyperParameterError)
    assert str(error) == "hps/x.yaml:2 epochs\n  got: g\n  expected: e\n  do: d"


def test_several_faults_are_counted_and_follow_their_lines():
    message = str(DOCUMENT.reject([fault("optim", "lr"), fault("optim", "lr", line=9), fault("epochs"), fault("x")]))
    headings = [line for line in message.splitlines() if line and not line.startswith("  ")]
    assert headings == [
        "4 errors in hps/x.yaml",
        "hps/x.yaml:1 x",
        "hps/x.yaml:2 epochs",
        "hps/x.yaml:6 optim.lr",
        "hps/x.yaml:9 optim.lr",
    ]
