import re
from importlib.metadata import version

import accmt
from accmt.version import __version__


def test_the_package_and_its_metadata_have_one_version():
    assert accmt.__version__ == __version__ == version("accmt")
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
