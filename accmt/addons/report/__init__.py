"""One page about one run or several, made of their run folders alone."""

from accmt.addons.report.page import write_report
from accmt.addons.report.records import RunRecord, name_apart, read_run

__all__ = ["RunRecord", "name_apart", "read_run", "write_report"]
