"""Whether the files of `accmt/` are all of this project.

Another project is called `accmt` on the public index. Its folder has the same name, so pip lets both write into one,
and what is imported is then a mixture. That is an error, whichever of them came last.
"""

from __future__ import annotations

from pathlib import Path

DISTRIBUTION = "accmt-trainer"
"""What pip calls this project; Python calls it `accmt`."""


def require_own_folder(package: str) -> None:
    """Check that no other distribution has written into the folder that holds this package.

    It lists one folder: `importlib.metadata` would take longer than the whole import of accmt.

    Args:
        package: The folder of the package.

    Raises:
        PackageConflictError: The project that is called `accmt` on the index is installed in the same place.
    """
    try:
        names = [path.name for path in Path(package).parent.iterdir()]
    except OSError:  # in an archive, where pip installs nothing
        return
    other = next((n for n in names if n.startswith("accmt-") and n.endswith((".dist-info", ".egg-info"))), None)
    if other is None:
        return
    from accmt.errors import PackageConflictError, fail

    version = other.removeprefix("accmt-").rpartition(".")[0]
    got = f"accmt {version}, another project, which writes into the same folder, {package}"
    do = f"pip uninstall --yes accmt {DISTRIBUTION}   (both: each may have replaced files of the other); install one"
    raise fail(PackageConflictError, f"import accmt ({DISTRIBUTION})", got=got, expected=f"{DISTRIBUTION} alone", do=do)
