"""Writing files so that a reader sees the old content or the new, never half of either."""

from accmt.files.atomic import fsync_file, fsync_folder, replace_file, require_writable_folder, write_text
from accmt.files.staging import staging_folder
from accmt.files.strict_json import JsonLines, dumps, loads, read_json_lines

__all__ = [
    "JsonLines",
    "dumps",
    "fsync_file",
    "fsync_folder",
    "loads",
    "read_json_lines",
    "replace_file",
    "require_writable_folder",
    "staging_folder",
    "write_text",
]
