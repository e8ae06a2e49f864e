"""Atomic file writes, locks, and disk space."""

from accmt.files.atomic import (
    current_folder,
    find_free_name,
    find_surplus,
    follow_umask,
    format_bytes,
    free_space,
    fsync_file,
    fsync_folder,
    is_current,
    place_beside,
    place_inside,
    replace_file,
    require_writable_folder,
    set_folder_aside,
    staging_folder,
    write_text,
)
from accmt.files.locks import LOCK_NAME, FolderLock, FolderTakenError, taking_turns
from accmt.files.strict_json import dumps, loads, read_json_line, read_json_lines

__all__ = [
    "LOCK_NAME",
    "FolderLock",
    "FolderTakenError",
    "current_folder",
    "dumps",
    "find_free_name",
    "find_surplus",
    "follow_umask",
    "format_bytes",
    "free_space",
    "fsync_file",
    "fsync_folder",
    "is_current",
    "loads",
    "place_beside",
    "place_inside",
    "read_json_line",
    "read_json_lines",
    "replace_file",
    "require_writable_folder",
    "set_folder_aside",
    "staging_folder",
    "taking_turns",
    "write_text",
]
