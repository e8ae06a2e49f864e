"""Writing files so that a reader sees the old content or the new, never half of either; and room on the disk."""

from accmt.files.atomic import follow_umask, fsync_file, fsync_folder, replace_file, require_writable_folder, write_text
from accmt.files.folder_lock import LOCK_NAME, FolderLock, FolderTakenError
from accmt.files.previous_folders import find_surplus, place_beside, place_inside
from accmt.files.space import format_bytes, free_space
from accmt.files.staging import find_free_name, staging_folder
from accmt.files.strict_json import JsonLines, dumps, loads, read_json_lines
from accmt.files.waiting import taking_turns

__all__ = [
    "LOCK_NAME",
    "FolderLock",
    "FolderTakenError",
    "JsonLines",
    "dumps",
    "find_free_name",
    "find_surplus",
    "follow_umask",
    "format_bytes",
    "free_space",
    "fsync_file",
    "fsync_folder",
    "loads",
    "place_beside",
    "place_inside",
    "read_json_lines",
    "replace_file",
    "require_writable_folder",
    "staging_folder",
    "taking_turns",
    "write_text",
]
