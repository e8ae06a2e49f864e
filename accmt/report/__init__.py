"""One page about one run or several, made of their run folders alone."""

from accmt.report.page import write_report
from accmt.report.records import RunRecord, read_run

__all__ = ["RunRecord", "read_run", "write_report"]
