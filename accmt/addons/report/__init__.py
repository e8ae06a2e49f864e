"""An HTML report about one or more runs, built from their run folders."""

from accmt.addons.report.page import write_report
from accmt.addons.report.records import RunRecord, name_apart, read_run

__all__ = ["RunRecord", "name_apart", "read_run", "write_report"]
