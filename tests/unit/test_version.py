import re
from importlib.metadata import PackageNotFoundError, version

import pytest

import accmt
from accmt.version import __version__


def test_the_package_and_its_metadata_have_one_version():
    try:
        installed = version("accmt")
    except PackageNotFoundError:
        pytest.skip("accmt is not installed: it runs from a checkout on PYTHONPATH")
    assert accmt.__version__ == __version__ == installed
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
