"""Reads rows from files on disk and in buckets by index, so that order, position and resume are accmt's own."""
