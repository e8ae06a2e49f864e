from accmt.errors import describe_value, nearest
from accmt.options.yaml_reader import suggest
from tests.tables import each

NAMES = ["weight_decay", "betas", "lr", "AdamW", "LinearWithWarmup"]


@each(
    ("written", "meant"),
    [
        ("weigth_decay", "weight_decay"),
        ("weightdecay", "weight_decay"),
        ("beta", "betas"),
        ("LR", "lr"),
        ("adamw", "AdamW"),
        ("LinearWarmup", "LinearWithWarmup"),
        ("xyz", None),
    ],
)
def test_the_nearest_name_is_found_whatever_its_case(written, meant):
    assert nearest(written, NAMES) == meant


def test_a_name_that_is_near_to_none_gets_the_other_advice():
    assert suggest("beta", NAMES, "remove it") == "write `betas`"
    assert suggest("xyz", NAMES, "remove it") == "remove it"


def test_a_value_is_shown_with_its_type():
    assert describe_value("1") == "'1' (str)"
    assert describe_value(True) == "True (bool)"
